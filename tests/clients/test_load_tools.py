"""Load generators, each with a handful of requests against the real model. They count tokens with the model's own
tokenizer, which they want as a folder in Hugging Face's layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.text.export import write_text_files
from tests.clients.environment import Environment
from tests.e2e.conftest import MODEL, Server


@pytest.fixture(scope="session")
def tokenizer(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_text_files(default_model, folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.mark.clients("guidellm", "two streams of synthetic chats, with its check of /health")
def test_guidellm(client: Environment, served: Server, tokenizer: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    client.run(
        client.program("guidellm"),
        "run",
        *("--backend", f"kind=openai_http,target={served.url},model={MODEL}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
        *("--output", f"kind=json,path={report}", "--disable-console-interactive"),
        cwd=tmp_path,
        timeout=600,
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["metrics"]["request_totals"]
    assert requests["errored"] == 0 and requests["successful"] >= 6


@pytest.mark.clients("aiperf", "a profile of streamed chats")
def test_aiperf(client: Environment, served: Server, tokenizer: Path, tmp_path: Path) -> None:
    client.run(
        client.program("aiperf"),
        "profile",
        *("--model", MODEL, "--url", served.url, "--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", tokenizer, "--concurrency", "2", "--request-count", "6"),
        *("--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8"),
        *("--artifact-dir", tmp_path / "artifacts", "--ui", "none"),
        cwd=tmp_path,
        timeout=600,
        env={"HF_HUB_OFFLINE": ""},  # when it is set, aiperf takes a folder for the name of a repository
    )
    (found,) = (tmp_path / "artifacts").rglob("profile_export_aiperf.json")
    report = json.loads(found.read_text())
    assert report["request_count"]["avg"] == 6
    assert report["time_to_first_token"]["avg"] > 0


@pytest.mark.clients("inference-perf", "ten seconds of streamed completions at a constant rate")
def test_inference_perf(client: Environment, served: Server, tokenizer: Path, tmp_path: Path) -> None:
    lengths = {"min": 8, "max": 32, "mean": 16, "std_dev": 4, "total_count": 20}
    settings = {
        "api": {"type": "completion", "streaming": True},
        "data": {"type": "random", "input_distribution": lengths, "output_distribution": {**lengths, "max": 16}},
        "load": {"type": "constant", "stages": [{"rate": 1, "duration": 10}], "num_workers": 1},
        "server": {"type": "vllm", "model_name": MODEL, "base_url": served.url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(tokenizer)},
        "storage": {"local_storage": {"path": str(tmp_path / "reports")}},
    }
    (tmp_path / "config.yml").write_text(json.dumps(settings))  # JSON is YAML
    client.run(client.program("inference-perf"), "--config_file", tmp_path / "config.yml", cwd=tmp_path, timeout=600)
    (found,) = (tmp_path / "reports").rglob("summary_lifecycle_metrics.json")
    report = json.loads(found.read_text())
    assert report["failures"]["count"] == 0 and report["successes"]["count"] == 10
