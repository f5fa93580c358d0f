"""lm-eval against the real model, with two tasks of our own, so that nothing is fetched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environment import Environment
from tests.e2e.conftest import MODEL, Server

TASKS = Path(__file__).resolve().parent / "lm_eval_tasks"


def evaluate(client: Environment, model: str, url: str, task: str, folder: Path, *more: str) -> dict[str, Any]:
    arguments = f"model={MODEL},base_url={url},num_concurrent=2,max_retries=1,max_length=2048"
    client.run(
        client.program("lm_eval"),
        *("--model", model, "--model_args", arguments, "--include_path", TASKS, "--tasks", task),
        *("--batch_size", "32", "--output_path", folder, *more),
        timeout=600,
        env={"HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"},
    )
    (found,) = folder.rglob("results_*.json")
    return json.loads(found.read_text())["results"][task]


@pytest.mark.clients("lm-eval", "local-completions: log-likelihoods, 32 prompts a request, the tokenizer by HTTP")
def test_loglikelihood(client: Environment, served: Server, tmp_path: Path) -> None:
    result = evaluate(client, "local-completions", f"{served.url}/v1/completions", "penstock_capitals", tmp_path)
    assert result["acc,none"] > 0.8


@pytest.mark.clients("lm-eval", "local-completions: generation, 24 prompts a request")
def test_generation(client: Environment, served: Server, tmp_path: Path) -> None:
    result = evaluate(client, "local-completions", f"{served.url}/v1/completions", "penstock_counting", tmp_path)
    assert "exact_match,none" in result


@pytest.mark.clients("lm-eval", "local-chat-completions: generation with the chat template")
def test_chat_generation(client: Environment, served: Server, tmp_path: Path) -> None:
    url = f"{served.url}/v1/chat/completions"
    result = evaluate(
        client, "local-chat-completions", url, "penstock_counting", tmp_path, "--apply_chat_template", "--limit", "6"
    )
    assert "exact_match,none" in result
