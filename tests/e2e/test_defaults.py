"""The default model answers a newcomer's first question rightly, because requests that say nothing get the sampling
values that its makers recommend."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest

from tests.e2e.conftest import MODEL, Server

QUESTION = "What is the capital of France?"
RUNS = 12
ENOUGH = 11


def test_the_models_values_are_shown(server: Server) -> None:
    (model,) = [m for m in httpx.get(f"{server.url}/v1/models").json()["data"] if m["id"] == MODEL]
    assert model["sampling"] == {"temperature": 0.2, "top_p": 0.9, "min_p": 0.8}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_paris_from_the_api_and_from_the_terminal(server: Server) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 256}
    replies = [httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300) for _ in range(RUNS)]
    said = [reply.json()["choices"][0]["message"]["content"] for reply in replies]
    assert sum("Paris" in answer for answer in said) >= ENOUGH, said

    command = [sys.executable, "-m", "penstock", "chat", "--url", server.url, "--quiet", QUESTION]
    said = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(RUNS)]
    assert sum("Paris" in answer for answer in said) >= ENOUGH, said
