"""Streams of remote models go on after a broken connection, as long as the gateway that began them holds them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.accounting.quotas import Quotas
from penstock.gateway.generation import remote_source
from penstock.gateway.generation.remote_streams import RemoteStreams
from penstock.protocol.errors import RateLimitExceeded
from penstock.text import TextModel
from tests.gateway.accounting.test_charges import total
from tests.gateway.conftest import Serving, eventually, until
from tests.gateway.generation.test_remote_features import wired
from tests.gateway.generation.test_resumption import Follower

SAID = "One moment, please; I shall look for it."
CHAT = {"model": "wire", "messages": [{"role": "user", "content": "hi"}], "stream": True}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}),
    "logprobs": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "stop": ("/v1/chat/completions", {**CHAT, "stop": ["look"], "include_stop_str_in_output": True}),
    "text": ("/v1/completions", {"model": "wire", "prompt": "hi", "stream": True, "max_tokens": 60, "echo": True}),
    "message": ("/v1/messages", {**CHAT, "max_tokens": 90}),
    "response": ("/v1/responses", {"model": "wire", "input": "hi", "stream": True}),
}


def slow(tmp_path: Path) -> dict[str, Any]:
    return {
        "wire": {"text": SAID, "pause_s": 0.004},
        "store_url": f"sqlite:///{tmp_path}/s.db",
        "gateway_timeout_s": 0.5,
    }


async def test_streams_of_every_api_go_on(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    async with wired(serving, text, **slow(tmp_path)) as (front, wire):

        async def break_off(name: str, number: int) -> None:
            client = Follower(*STREAMS[name])
            for most in (2 + number, 12 + number, None):
                status = await client.follow(front.client, most)
                assert status == 200, (name, most, client.events[-1:])
            whole = client.again
            assert await whole.follow(front.client) == 200, "what has ended is sent again"
            # The first event of a message has the prompt's length, which is an estimate until the server has told it.
            assert client.events[1:] == whole.events[1:], name
            assert len(client.events) == int(client.last.partition(".")[2])

        await asyncio.gather(*(break_off(name, number) for number, name in enumerate(STREAMS)))
        assert len(wire.asked) == len(STREAMS), "the server was asked once for each"
        used = await until(lambda: total(front), lambda found: found.get("requests") == len(STREAMS))
        assert used["prompt_tokens"] >= 11 * (len(STREAMS) - 1)


async def test_only_the_same_request_of_the_same_client_in_time(
    serving: Serving, text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteStreams.__init__, "__defaults__", (0.3,))
    async with wired(serving, text, **slow(tmp_path)) as (front, wire):
        client = Follower(*STREAMS["chat"])
        assert await client.follow(front.client, 5) == 200
        other = Follower(client.path, {**client.body, "temperature": 0.5})
        other.last = client.last
        assert await other.follow(front.client) == 404, "another request"
        made_up = client.again
        made_up.last = "0" * 32 + ".1"
        assert await made_up.follow(front.client) == 404
        await asyncio.sleep(0.5)
        assert await client.follow(front.client) == 404, "nobody came back in time"
        used = await until(lambda: total(front), lambda found: found.get("requests") == 1)
        assert used["completion_tokens"] > 4 and used["prompt_tokens"] > 0
        await eventually(lambda: front.parts.registry.remotes["wire"].in_flight == 0)
        assert wire.asked


async def test_an_old_connection_gives_way(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    async with wired(serving, text, **slow(tmp_path)) as (front, _wire):
        old, hold = Follower(*STREAMS["chat"]), asyncio.Event()
        stuck = asyncio.create_task(old.follow(front.client, 5, hold))
        await eventually(lambda: len(old.events) == 5)
        new = old.again
        assert await new.follow(front.client) == 200
        hold.set()
        await stuck
        text_of = [event for event in new.events if "content" in event]
        assert len(text_of) >= len(SAID)


async def test_a_stream_that_is_too_long_to_keep_ends_with_its_client(
    serving: Serving, text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_source, "MOST_KEPT", 400)
    async with wired(serving, text, **slow(tmp_path)) as (front, _wire):
        client = Follower(*STREAMS["chat"])
        assert await client.follow(front.client, 12) == 200
        assert await client.follow(front.client) == 404
        await eventually(lambda: front.parts.registry.remotes["wire"].in_flight == 0)


async def test_a_refused_return_may_be_tried_again(
    serving: Serving, text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with wired(serving, text, **slow(tmp_path)) as (front, wire):
        client = Follower(*STREAMS["chat"])
        assert await client.follow(front.client, 5) == 200
        reserve, refusals = Quotas.reserve, [RateLimitExceeded("not now", retry_after=0.1)]

        async def once(*given: Any, **more: Any) -> Any:
            if refusals:
                raise refusals.pop()
            return await reserve(*given, **more)

        monkeypatch.setattr(Quotas, "reserve", once)
        assert await client.follow(front.client) == 429
        client.events = client.events[:5]
        assert await client.follow(front.client) == 200
        assert len(wire.asked) == 1 and any("[DONE]" in event for event in client.events)
