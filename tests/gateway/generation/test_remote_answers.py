"""What other servers send beside the text: usage that cannot be, calls that rules are for, and what they are sent."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.remote.server import RemoteServer
from penstock.backends.remote.upstream import Upstream
from penstock.config.guardrails import GuardrailConfig
from penstock.config.schema import PriceConfig
from penstock.routing.remotes import RemoteModel
from tests.backends.remote.scripted_server import Reply, ScriptedServer, scripted, sse
from tests.gateway.conftest import Running, Serving, events

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]

PRICES = (PriceConfig(input_price=1.0, output_price=1.0),)


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **more}


def called(*arguments: str) -> list[dict[str, Any]]:
    """Chunks of a call whose arguments come in pieces."""
    begin = chunk({"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": {"name": "f"}}]})
    parts = [chunk({"tool_calls": [{"index": 0, "function": {"arguments": part}}]}) for part in arguments]
    return [begin, *parts, chunk({}, "tool_calls")]


@asynccontextmanager
async def behind(serving: Serving, reply: Reply, **settings: Any) -> AsyncIterator[tuple[Running, ScriptedServer]]:
    """A gateway whose remote model `far` answers with `reply`."""
    async with scripted(reply) as there:
        far = RemoteModel(
            "far",
            [RemoteServer("0", Upstream(f"{there.root}/v1", "m", timeout_s=60.0))],
        )
        far.fallback = settings.pop("fallback", ())
        async with serving(others=[far], prices=PRICES, **settings) as front:
            yield front, there


@pytest.mark.parametrize(
    ("usage", "prompt", "completion"),
    [
        ({"prompt_tokens": -5, "completion_tokens": -7}, None, 3),
        ({"prompt_tokens": 4, "completion_tokens": None}, 4, 3),
        ({"prompt_tokens": 0, "completion_tokens": 0}, None, 3),
        ({"prompt_tokens": 4, "completion_tokens": 10**30}, 4, 2**31 - 1),
        ({"prompt_tokens": 4, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 99}}, 4, 9),
    ],
)
async def test_a_usage_that_cannot_be_is_not_charged(
    serving: Serving, tmp_path: Path, usage: dict[str, Any], prompt: int | None, completion: int
) -> None:
    said = [chunk({"content": word}) for word in ("one ", "two ", "three")]
    reply = Reply(sse(*said, chunk({}, "stop"), chunk(usage=usage), done=True))
    store = f"sqlite:///{tmp_path / 'x.db'}"
    async with behind(serving, reply, store_url=store) as (front, _):
        answer = (await front.chat(model="far")).json()
        assert answer["choices"][0]["message"]["content"] == "one two three"
        counted = answer["usage"]
        assert counted["completion_tokens"] == completion and counted["prompt_tokens"] > 0
        assert prompt is None or counted["prompt_tokens"] == prompt
        assert 0 <= counted["prompt_tokens_details"]["cached_tokens"] <= counted["prompt_tokens"]
        (row,) = (await front.client.get("/v1/usage?by=model")).json()["data"]
        assert (row["prompt_tokens"], row["completion_tokens"]) == (counted["prompt_tokens"], completion)
        assert float(row["cost"]) > 0


async def test_what_a_model_wrote_before_a_fallback_answered_is_free(serving: Serving, tmp_path: Path) -> None:
    said = [chunk({"content": word}) for word in ("one ", "two ", "three")]
    reply = Reply(sse(*said), cut=True)
    store = f"sqlite:///{tmp_path / 'x.db'}"
    async with behind(serving, reply, store_url=store, fallback=("tiny",)) as (front, _):
        whole = await front.chat(model="far", max_tokens=5)
        assert whole.json()["choices"][0]["message"]["content"] == "Hello", "nothing was out, so another one answers"
        usage = {row["model"]: row for row in (await front.client.get("/v1/usage?by=model")).json()["data"]}
        assert float(usage["far"]["cost"]) == 0
        assert usage["tiny"]["completion_tokens"] == whole.json()["usage"]["completion_tokens"] == 5

        broken = await front.chat(model="far", stream=True)
        assert "engine_lost" in broken.text and "two" in broken.text
        usage = {row["model"]: row for row in (await front.client.get("/v1/usage?by=model")).json()["data"]}
        assert float(usage["far"]["cost"]) > 0, "what the client got is paid for"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("action", "shown"), [("refuse", '{"to": "'), ("redact", '{"to": "[redacted]", "n": 1}')])
async def test_rules_for_answers_hold_for_the_arguments_of_calls(
    serving: Serving, stream: bool, action: str, shown: str
) -> None:
    pieces = called('{"to": "123-', "45-67", '89", "n"', ": 1}")
    rule = GuardrailConfig(
        name="numbers",
        stage="output",
        action=action,
        patterns=(r"\d{3}-\d{2}-\d{4}",),  # type: ignore[arg-type]
    )
    async with behind(serving, Reply(sse(*pieces, done=True)), guardrails=(rule,)) as (front, _):
        reply = await front.chat(model="far", stream=stream, tools=TOOLS)
        if stream:
            choices = [json.loads(event)["choices"][0] for event in events(reply.text)[:-1]]
            parts = [call for choice in choices for call in choice["delta"].get("tool_calls") or ()]
            arguments = "".join(call["function"].get("arguments") or "" for call in parts)
            ended = choices[-1]["finish_reason"]
        else:
            (choice,) = reply.json()["choices"]
            arguments, ended = choice["message"]["tool_calls"][0]["function"]["arguments"], choice["finish_reason"]
        assert arguments == shown and ended == ("content_filter" if action == "refuse" else "tool_calls")
        assert await front.metric(f'penstock_guardrails_total{{rule="numbers",stage="output",action="{action}"}}') == 1


async def test_fields_that_were_not_given_are_not_sent_as_null(serving: Serving) -> None:
    schema = {"type": "object", "properties": {"a": {"type": ["string", "null"], "default": None}}}
    reply = Reply(sse(chunk({"content": "{}"}), chunk({}, "stop"), done=True))
    async with behind(serving, reply) as (front, there):
        await front.chat(
            model="far",
            tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}],
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        )
        body = there.asked[-1].json
        assert body["tools"] == [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        assert body["response_format"] == {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
