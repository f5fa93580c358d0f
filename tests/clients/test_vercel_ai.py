"""Vercel's `ai` with each of its providers that can reach us."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.environment import Environment
from tests.clients.scripted_server import Prompt, ScriptedServer, call, calls, scripted_server
from tests.e2e.conftest import MODEL, Server

EMBEDDER = "minilm"


def answers(prompt: Prompt) -> str:
    """Greets, makes a person where an object is asked for, and calls two tools, then one of them again."""
    if "Make a person." in prompt.text:
        return '{"name": "Ann", "age": 40}'
    if "weather in Paris" not in prompt.text:
        return "Hello, world!"
    if not prompt.results:
        return "Let me look.\n" + calls(("weather", {"city": "Paris"}), ("clock", {}))
    if len(prompt.results) == 2:
        return call("weather", city="Rome")
    return " ".join(prompt.results)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """With a store: the Responses provider refers to items of earlier answers."""
    folder = tmp_path_factory.mktemp("store")
    with scripted_server(store_url=f"sqlite:///{folder}/state.db") as server:
        yield server


def everything(client: Environment, server: ScriptedServer, provider: str) -> dict[str, object]:
    server.answer(answers)
    said = client.script("vercel_ai.mjs", provider, server.url, server.model)
    assert not server.failures()
    assert said["text"] == said["stream"]["text"] == "Hello, world!"  # type: ignore[index]
    assert said["object"] == {"name": "Ann", "age": 40}
    told = ["It rains in Paris.", "It is noon.", "It rains in Rome."]
    assert said["loop"] == {"text": " ".join(told), "steps": 3, "results": told}
    assert said["loopedStream"]["steps"] == 3  # type: ignore[index]
    assert said["loopedStream"]["text"].endswith(" ".join(told))  # type: ignore[index]
    for usage in (said["usage"], said["stream"]["usage"]):  # type: ignore[index]
        assert usage["inputTokens"] > 0 and usage["outputTokens"] == 14  # type: ignore[index]
    return said


@pytest.mark.clients("vercel-ai", "text, streams, tool steps and objects, @ai-sdk/openai chat")
def test_openai_chat(client: Environment, scripted: ScriptedServer) -> None:
    everything(client, scripted, "chat")


@pytest.mark.clients("vercel-ai", "text, streams, tool steps and objects, @ai-sdk/openai responses")
def test_openai_responses(client: Environment, scripted: ScriptedServer) -> None:
    everything(client, scripted, "responses")
    sent = [item for one in scripted.posted("/v1/responses") for item in one.body["input"]]
    assert any(item.get("type") == "item_reference" for item in sent)


@pytest.mark.clients("vercel-ai", "text, streams, tool steps and objects, @ai-sdk/openai-compatible")
def test_openai_compatible(client: Environment, scripted: ScriptedServer) -> None:
    everything(client, scripted, "compatible")


@pytest.mark.clients("vercel-ai", "text, streams, tool steps and objects, @ai-sdk/anthropic")
def test_anthropic(client: Environment, scripted: ScriptedServer) -> None:
    everything(client, scripted, "anthropic")


@pytest.mark.clients("vercel-ai", "text, streams, tool steps and objects, ollama-ai-provider-v2")
def test_ollama(client: Environment, scripted: ScriptedServer) -> None:
    everything(client, scripted, "ollama")


@pytest.mark.clients("vercel-ai", "text, streams and embeddings with three providers")
def test_a_served_model(client: Environment, served: Server) -> None:
    said = client.script("vercel_ai_embed.mjs", served.url, MODEL, EMBEDDER)
    texts = [text for pair in said["texts"] for text in pair]  # type: ignore[attr-defined]
    assert texts[0] and set(texts) == {texts[0]}, texts
    assert said["dimensions"] == [[384, True]] * 3
