"""Frameworks that people build with: their chat classes against the real model, their agents against the script."""

from __future__ import annotations

import json

import pytest

from tests.clients.environment import Environment
from tests.clients.scripted_server import Prompt, ScriptedServer, call
from tests.e2e.conftest import MODEL, Server


def weather(prompt: Prompt) -> str:
    """Asks for the weather once, then says what came back."""
    return prompt.results[-1] if prompt.results else call("weather", city="Paris")


@pytest.mark.clients("langchain-openai", "invoke, stream, batch, structured output, embeddings")
def test_langchain(client: Environment, served: Server) -> None:
    said = client.script("langchain_agent.py", f"{served.url}/v1", MODEL, "minilm")
    assert "Paris" in said["invoked"]
    assert said["streamed"] == said["invoked"] == said["batch"][1]
    assert said["person"] == {"name": "Alice", "age": 31}
    assert said["dimensions"] == [384, 384]


@pytest.mark.clients("langchain-openai", "a LangGraph agent with a tool, whole and streamed; tools over /v1/responses")
def test_langgraph(client: Environment, scripted: ScriptedServer) -> None:
    scripted.answer(weather)
    said = client.script("langchain_agent.py", scripted.openai, scripted.model, "")
    assert not scripted.failures()
    assert said["turns"] == ["human", "ai", "tool", "ai"]
    assert said["said"] == said["streamed"] == "It rains in Paris."
    assert said["responses"] == [{"city": "Paris"}]


@pytest.mark.clients("llama-index", "chat, stream, complete, embeddings")
def test_llama_index(client: Environment, served: Server) -> None:
    said = client.script("llama_index_agent.py", f"{served.url}/v1", MODEL, "minilm")
    assert "Paris" in said["chat"]
    assert said["streamed"] == said["chat"]
    assert said["completed"].startswith(" four")
    assert said["dimensions"] == [384, 384]


@pytest.mark.clients("llama-index", "a FunctionAgent with a tool")
def test_llama_index_agent(client: Environment, scripted: ScriptedServer) -> None:
    scripted.answer(weather)
    said = client.script("llama_index_agent.py", scripted.openai, scripted.model, "")
    assert not scripted.failures()
    assert said["agent"] == "It rains in Paris."


@pytest.mark.clients("instructor", "tools, JSON schema and JSON modes, whole and in parts; from_anthropic")
def test_instructor(client: Environment, scripted: ScriptedServer) -> None:
    alice = {"name": "Alice", "age": 31}
    scripted.answer(lambda prompt: call(next(iter(prompt.tools)), **alice) if prompt.tools else json.dumps(alice))
    said = client.script("instructor_modes.py", scripted.url, scripted.model)
    assert not scripted.failures()
    assert all(person == alice for person in said.values()), said


@pytest.mark.clients("pydantic-ai", "an agent with a tool and a typed result over chat, responses and messages")
def test_pydantic_ai(client: Environment, scripted: ScriptedServer) -> None:
    def script(prompt: Prompt) -> str:
        if not prompt.results:
            return call("weather", city="Paris")
        (result,) = (name for name in prompt.tools if name != "weather")
        return call(result, city="Paris", rain=True)

    scripted.answer(script)
    said = client.script("pydantic_ai_agent.py", scripted.url, scripted.model)
    assert not scripted.failures()
    assert all(report == {"city": "Paris", "rain": True} for report in said.values()), said
