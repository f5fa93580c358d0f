"""curl, as the README has it."""

from __future__ import annotations

import json

import pytest

from tests.clients.environment import Environment
from tests.e2e.conftest import MODEL, Server


@pytest.mark.clients("curl", "a chat, whole and streamed, with -N")
def test_chat(client: Environment, served: Server) -> None:
    url = f"{served.url}/v1/chat/completions"
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 16,
    }
    post = ("curl", "-sS", "--fail-with-body", url, "-H", "content-type: application/json", "-d")
    whole = json.loads(client.run(*post, json.dumps(body)).stdout)
    assert "Paris" in whole["choices"][0]["message"]["content"]
    streamed = client.run(*post, json.dumps({**body, "stream": True}), "-N").stdout
    events = [line.removeprefix("data: ") for line in streamed.splitlines() if line]
    assert events[-1] == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1])
    assert text == whole["choices"][0]["message"]["content"]
