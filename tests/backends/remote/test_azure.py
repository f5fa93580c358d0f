"""Azure OpenAI: deployments, versions, filters (R-RT-8, R-RT-9)."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.protocol.errors import ContentBlocked
from tests.backends.remote.scripted_server import TOOLS, Asked, Reply, ask, client, error, reply_json, scripted, sse

SAFE = {kind: {"filtered": False, "severity": "safe"} for kind in ("hate", "self_harm", "sexual", "violence")}
FIRST = {
    "choices": [],
    "created": 0,
    "id": "",
    "model": "",
    "object": "",
    "prompt_filter_results": [{"prompt_index": 0, "content_filter_results": SAFE}],
}


def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"content_filter_results": SAFE, "delta": delta, "finish_reason": reason, "index": 0, "logprobs": None}
    return {"choices": [choice], "created": 1, "id": "chatcmpl-1", "object": "chat.completion.chunk", **more}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 8, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
}
TEXT = sse(
    FIRST,
    chunk({"role": "assistant", "content": "", "refusal": None}),
    chunk({"content": "Hé"}),
    chunk({"content": "llo 日本"}),
    chunk({}, "stop"),
    {"choices": [{"index": 0, "finish_reason": None, "content_filter_results": SAFE, "content_filter_offsets": {}}]},
    USAGE,
    done=True,
)


async def test_a_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZ", "key-1")
    async with (
        scripted(Reply(TEXT)) as there,
        client(there, "azure", model="gpt 4o", key_env="AZ", api_version="2025-01-01-preview") as server,
    ):
        answer = await ask(server, seed=3, logprobs=True)
        monkeypatch.setenv("AZ", "Bearer entra")
        await ask(server)
        await server.check()
    assert (answer.text, answer.reason, answer.usage) == ("Héllo 日本", "stop", (8, 2, 4))
    first, second, health = there.asked
    assert first.target == "/openai/deployments/gpt%204o/chat/completions?api-version=2025-01-01-preview"
    assert first.headers["api-key"] == "key-1" and "authorization" not in first.headers
    assert "model" not in first.json and first.json["seed"] == 3
    assert second.headers["authorization"] == "Bearer entra" and "api-key" not in second.headers
    assert health.target == "/openai/models?api-version=2025-01-01-preview"


async def test_the_newer_api_names_the_model_in_the_body() -> None:
    async with scripted(Reply(TEXT)) as there, client(there, "azure", path="/openai/v1") as server:
        await ask(server)
        await server.check()
    assert there.asked[0].target == "/openai/v1/chat/completions" and there.asked[0].json["model"] == "m"
    assert there.asked[1].target == "/openai/v1/models"


async def test_a_filtered_answer() -> None:
    stream = sse(FIRST, chunk({"content": "Well"}), chunk({}, "content_filter"), done=True)
    async with scripted(Reply(stream)) as there, client(there, "azure") as server:
        answer = await ask(server)
    assert answer.text == "Well" and answer.reason == "content_filter"


async def test_a_filtered_prompt() -> None:
    body = {
        "error": {
            "message": "The response was filtered due to the prompt triggering a content policy.",
            "type": None,
            "param": "prompt",
            "code": "content_filter",
            "status": 400,
            "innererror": {"code": "ResponsibleAIPolicyViolation", "content_filter_result": SAFE},
        }
    }
    async with scripted(error(400, body)) as there, client(there, "azure") as server:
        with pytest.raises(ContentBlocked, match="filtered"):
            await ask(server)


async def test_calls_and_embeddings() -> None:
    def script(asked: Asked) -> Reply:
        if "embeddings" in asked.target:
            assert asked.json["input"] == ["a", "b"]
            rows = [{"index": 1, "embedding": [3, 4]}, {"index": 0, "embedding": [1.0, 2.0]}]
            return reply_json({"data": rows, "usage": {"prompt_tokens": 2, "total_tokens": 2}})
        begun = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
        parts = [{"index": 0, "function": {"arguments": text}} for text in ('{"ci', 'ty":"Rome"}')]
        other = {"index": 1, "id": "call_2", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
        deltas = [chunk({"tool_calls": [call]}) for call in (begun, *parts, other)]
        return Reply(sse(FIRST, *deltas, chunk({}, "tool_calls"), USAGE, done=True))

    async with scripted(script) as there, client(there, "azure") as server:
        answer = await ask(server, tools=TOOLS)
        found = await server.embed(["a", "b"], "r")
    assert answer.calls == [("call_1", "weather", {"city": "Rome"}), ("call_2", "clock", {})]
    assert found.vectors == [[1.0, 2.0], [3.0, 4.0]] and found.prompt_tokens == 2
    assert there.asked[1].target.startswith("/openai/deployments/m/embeddings?api-version=")


async def test_fields_it_does_not_know_are_found_beforehand() -> None:
    async with scripted(Reply(TEXT)) as there, client(there, "azure") as server:
        found = server.fit({"top_k": 5, "min_p": 0, "repetition_penalty": 1.0, "n": 2, "cache_salt": "x"})
    assert found.refused == ("top_k",) and found.ignored == ("min_p", "repetition_penalty", "cache_salt")
    assert found.body == {"n": 2}
