"""The official SDKs of OpenAI and Anthropic, each from an environment that has nothing else."""

from __future__ import annotations

import pytest

from tests.clients.environment import Environment
from tests.clients.scripted_server import Prompt, ScriptedServer, calls
from tests.e2e.conftest import MODEL, Server


def two_cities(prompt: Prompt) -> str:
    """Asks for the weather of two cities at once, then says what came back."""
    return " ".join(prompt.results) or calls(("weather", {"city": "Paris"}), ("weather", {"city": "Rome"}))


@pytest.mark.clients("openai", "chat, stream, parse, responses, completions, embeddings, models")
def test_openai(client: Environment, served: Server) -> None:
    said = client.script("openai_sdk.py", f"{served.url}/v1", MODEL, "minilm")
    assert MODEL in said["models"]
    assert "Paris" in said["chat"]
    assert said["streamed"] == said["chat"]
    assert said["parsed"] == {"name": "Alice", "age": 31}
    assert "Paris" in said["response"]
    assert said["completion"].startswith(" four")
    assert said["dimensions"] == [384, 384]


@pytest.mark.clients("openai", "a tool loop with two calls at once, whole and streamed")
def test_openai_tools(client: Environment, scripted: ScriptedServer) -> None:
    scripted.answer(two_cities)
    said = client.script("openai_tools.py", scripted.openai, scripted.model)
    assert said["calls"] == said["streamed"]
    assert len(said["calls"]) == 2
    assert said["whole"] == said["after_stream"] == "It rains in Paris. It rains in Rome."


@pytest.mark.clients("anthropic", "messages, stream, count_tokens, a tool loop with two calls at once")
def test_anthropic(client: Environment, scripted: ScriptedServer) -> None:
    scripted.answer(two_cities)
    said = client.script("anthropic_sdk.py", scripted.url, scripted.model)
    assert said["stop"] == "tool_use"
    assert said["calls"] == said["streamed"] == [{"city": "Paris"}, {"city": "Rome"}]
    assert said["text"] == "It rains in Paris. It rains in Rome."
    assert said["counted"] > 100
