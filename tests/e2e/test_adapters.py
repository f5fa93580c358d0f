"""Adapters on a real server with the official client: load through the admin API, list, use, unload; with ranks too."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import torch
from tokenizers import Tokenizer
from typer.testing import CliRunner

from penstock.cli.app import app
from tests.e2e.conftest import MODEL, Server
from tests.e2e.test_supervisor import Server as ServerProcess
from tests.e2e.test_transformers import write_tokenizer
from tests.engine.adapters.files import write_adapter
from tests.engine.adapters.test_newer_families import FAMILIES, trained
from tests.engine.tiny import write_checkpoint


def say(client: openai.OpenAI, model: str) -> str:
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Name three colours."}], max_tokens=12, temperature=0
    )
    assert answer.model == model
    return answer.choices[0].message.content or ""


@pytest.mark.slow
def test_load_list_use_unload(server: Server, default_model: Path, tmp_path: Path) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    folder = write_adapter(tmp_path / "style", default_model, rank=8, size=0.12)
    plain = say(client, MODEL)
    with pytest.raises(openai.NotFoundError):
        say(client, "style")

    loaded = httpx.post(f"{server.url}/v1/admin/adapters", json={"name": "style", "source": str(folder)}, timeout=180)
    assert loaded.status_code == 200 and loaded.json()["state"] == "ready", loaded.text
    models = {model.id: model for model in client.models.list()}
    assert models["style"].model_extra is not None and models["style"].model_extra["parent"] == MODEL
    styled = say(client, "style")
    assert styled != plain and say(client, MODEL) == plain and say(client, "style") == styled
    server.wait_for("penstock_adapter_on_device", 1)

    assert httpx.delete(f"{server.url}/v1/admin/adapters/style").status_code == 200
    with pytest.raises(openai.NotFoundError):
        say(client, "style")
    assert "style" not in {model.id for model in client.models.list()}


@pytest.mark.slow
def test_the_command_line_does_the_same(server: Server, default_model: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "cli", default_model, rank=4, targets=("q_proj", "v_proj"))

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["adapters", *arguments, "--url", server.url])
        assert result.exit_code == 0, (result.output, result.exception)
        return result.output

    assert "cli: ready, LoRA, rank 4" in run("load", "cli", str(folder))
    assert "cli: pinned" in run("pin", "cli")
    assert "cli: not pinned" in run("pin", "cli", "--off")
    assert "cli" in run("list") and "ready" in run("list")
    assert "cli: unloaded" in run("unload", "cli")
    assert "cli" not in run("list").replace(str(folder), "")
    refused = CliRunner().invoke(app, ["adapters", "unload", "cli", "--url", server.url])
    assert refused.exit_code != 0 and "No adapter is called" in str(refused.exception)


@pytest.mark.slow
def test_three_ranks_serve_adapters_that_are_listed_and_that_come_later(default_model: Path, tmp_path: Path) -> None:
    listed = write_adapter(tmp_path / "listed", default_model, rank=24, size=0.12)
    later = write_adapter(tmp_path / "later", default_model, rank=4, size=0.12, seed=5, targets=("q_proj", "v_proj"))
    broken = write_adapter(tmp_path / "broken", default_model, rank=4)
    (broken / "adapter_model.safetensors").write_bytes(b"nonsense")
    adapters = f"models.*.adapters=[{{name: listed, source: {listed}}}, {{name: broken, source: {broken}}}]"
    server = ServerProcess("--tensor-parallel", "3", "--set", adapters)
    try:
        server.wait_for("curl http")
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)
        body = {"name": "later", "source": str(later)}
        loaded = httpx.post(f"{server.url}/v1/admin/adapters", json=body, timeout=300)
        assert loaded.status_code == 200 and loaded.json()["state"] == "ready", loaded.text
        alone = {model: say(client, model) for model in (MODEL, "listed", "later")}
        assert len(set(alone.values())) == 3
        with ThreadPoolExecutor(3) as together:
            assert dict(zip(alone, together.map(lambda model: say(client, model), alone), strict=True)) == alone
        with pytest.raises(openai.BadRequestError, match="damaged or incomplete"):
            say(client, "broken")
        assert httpx.delete(f"{server.url}/v1/admin/adapters/later").status_code == 200
        with pytest.raises(openai.NotFoundError):
            say(client, "later")
        assert say(client, "listed") == alone["listed"]
    finally:
        server.close()


@pytest.mark.slow
def test_newer_families_answer_as_with_the_adapter_merged(tmp_path: Path) -> None:
    models, expected, prompt = [], {}, "what is in no picture"
    for family in FAMILIES:
        base = write_checkpoint(family, tmp_path / family, vocab_size=257)
        write_tokenizer(base)
        tuned = trained(base, tmp_path / f"{family}-tuned", family, "lora").model
        tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
        ids = tokenizer.encode(prompt).ids
        answer = tuned.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        expected[f"{family}-tuned"] = tokenizer.decode(answer[0, len(ids) :].tolist())
        models.append({
            "source": str(base), "name": family, "max_running": 4, "num_blocks": 64, "dtype": "float32",
            "device": "cpu", "threads": 1,
            "adapters": [{"name": f"{family}-tuned", "source": str(tmp_path / f"{family}-tuned")}],
        })  # fmt: skip
    config = tmp_path / "penstock.yaml"
    config.write_text(json.dumps({"models": models}))
    server = ServerProcess("-c", str(config), defaults=False)
    try:
        server.wait_for("curl http")
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        def answer_of(model: str) -> str:
            return client.completions.create(model=model, prompt=prompt, max_tokens=12, temperature=0).choices[0].text

        assert {name: answer_of(name) for name in expected} == expected
        assert all(answer_of(family) != expected[f"{family}-tuned"] for family in FAMILIES)
    finally:
        server.close()
