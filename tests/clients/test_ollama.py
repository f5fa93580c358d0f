"""Tools that were made for Ollama's API."""

from __future__ import annotations

import json

import pytest

from tests.clients.environment import Environment
from tests.clients.scripted_server import Prompt, ScriptedServer, call
from tests.e2e.conftest import MODEL, Server

LOCAL = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def weather(prompt: Prompt) -> str:
    """Asks for the weather where there is such a tool, then says what came back."""
    if prompt.results:
        return prompt.results[-1]
    return call("weather", city="Paris") if "weather" in prompt.tools else "Hello."


@pytest.mark.clients("ollama", "chat, generate, formats, embeddings, lists")
def test_session(client: Environment, served: Server) -> None:
    said = client.script("ollama_session.py", served.url, MODEL)
    assert "Paris" in said["whole"] and said["streamed"] == said["whole"] and said["eval_count"] <= 12
    total, prompt, decode = said["durations"]
    assert 0 < decode < total and 0 < prompt < total
    assert "Paris" in said["generated"] and "city" in json.loads(said["formed"])
    assert MODEL in said["tags"] and said["running"] == [MODEL] and "tools" in said["capabilities"]
    assert said["embeddings"] == [384, 384] and said["embedding"] == 384
    assert said["pulled"] == ["success"] and said["missing"][0] == 404


@pytest.mark.clients("ollama", "a tool loop, whole and streamed")
def test_tool_loop(client: Environment, scripted: ScriptedServer) -> None:
    scripted.answer(weather)
    said = client.script("ollama_session.py", scripted.url, scripted.model, "tools")
    assert said == {"calls": ["weather"], "streamed": ["Paris"], "answer": "It rains in Paris."}
    assert not scripted.failures()


@pytest.mark.clients("langchain-ollama", "chat, a stream, a tool loop, a prompt")
def test_langchain(client: Environment, scripted: ScriptedServer) -> None:
    scripted.answer(weather)
    said = client.script("langchain_ollama_session.py", scripted.url, scripted.model)
    assert said["calls"] == ["weather"] and said["answer"] == "It rains in Paris." and said["tokens"] > 0
    assert said["streamed"] == said["completed"] == "Hello."


@pytest.mark.clients("litellm", "a tool loop of two turns, whole and streamed, provider ollama_chat")
def test_litellm(client: Environment, scripted: ScriptedServer) -> None:
    scripted.answer(weather)
    said = client.script("litellm_tool_loop.py", f"ollama_chat/{scripted.model}", scripted.url, env=LOCAL)
    assert not scripted.failures()
    assert said["turns"][-1]["content"] == "It rains in Paris."
    assert said["second"] == "It snows in Paris."
