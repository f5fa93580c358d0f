"""Streams with event ids: what the header may say, and how streams of every API go on after a broken connection."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import openai
import pytest

from penstock.backends.mailbox import Arrival
from penstock.backends.native import NativeBackend
from penstock.config.schema import TierConfig
from penstock.engine.request import Delta, FinishReason, Request, SamplingParams
from penstock.gateway.generation.resumption import EventNumbers, singly
from penstock.gateway.process.settings import ModelSettings
from penstock.protocol.messages import RESUME_S, Claimed
from penstock.routing.replicas import ReplicaSet
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from tests.backends.test_native import RunningEngine
from tests.gateway.accounting.test_charges import total
from tests.gateway.api.test_identity import make_key
from tests.gateway.conftest import Running, Serving, eventually, until
from tests.gateway.generation.test_tool_choice import CALL, CLOCK, WEATHER
from tests.scripted import ScriptedEngine

pytestmark = pytest.mark.asyncio

SAID = f"One moment, please; I shall look.\n{CALL}"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 400}
MESSAGE = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
ITEM = {"type": "function", **WEATHER["function"]}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}),
    "tools": ("/v1/chat/completions", {**CHAT, "tools": [WEATHER, CLOCK]}),
    "logprobs": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "stop": ("/v1/chat/completions", {**CHAT, "stop": ["arguments"]}),
    "text": ("/v1/completions", {"model": "tiny", "prompt": "hi", "stream": True, "max_tokens": 60, "echo": True}),
    "message": ("/v1/messages", {**CHAT, "tools": [MESSAGE]}),
    "response": (
        "/v1/responses",
        {"model": "tiny", "input": "hi", "stream": True, "max_output_tokens": 400, "tools": [ITEM]},
    ),
}


@asynccontextmanager
async def gateways(
    serving: Serving, tmp_path: Path, text: TextModel, *, replicas: int = 1, step_s: float = 0.003, **settings: Any
) -> AsyncIterator[list[Running]]:
    """Two of them, with the same engines and one store."""
    engines = [
        RunningEngine(ScriptedEngine(text, SAID, step_s=step_s, max_model_len=4096), f"ipc://{tmp_path}/{number}")
        for number in range(replicas)
    ]

    def backend() -> ReplicaSet:
        return ReplicaSet(
            "tiny", [NativeBackend(engine.listener.endpoint, name=str(place)) for place, engine in enumerate(engines)]
        )

    given = {
        "store_url": f"sqlite:///{tmp_path / 'state.db'}",
        "models": (ModelSettings("tiny", "", input_price=1.0, output_price=2.0),),
        "gateway_timeout_s": 1.0,
        **settings,
    }
    try:
        async with (
            serving(backend=backend(), **given) as one,
            serving(backend=backend(), **given) as two,
        ):
            yield [one, two]
    finally:
        for engine in engines:
            engine.close()


class Follower:
    """A client of one stream: its events, without what depends on the time, and the id of the last one."""

    def __init__(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self.path, self.body, self.headers = path, body, headers or {}
        self.events: list[str] = []
        self.last = "new"

    async def follow(
        self, client: httpx.AsyncClient, most: int | None = None, hold: asyncio.Event | None = None
    ) -> int:
        """Reads up to `most` events, then breaks off, or waits for `hold` and reads on."""
        headers = {**self.headers, "last-event-id": self.last}
        async with client.stream("POST", self.path, json=self.body, headers=headers) as reply:
            id = ""
            async for line in reply.aiter_lines():
                if line.startswith("id: "):
                    id = line.removeprefix("id: ")
                elif line.startswith("data: ") and (id or "ping" not in line):
                    self.last, id = id or self.last, ""
                    moving = "created|created_at|completed_at" + "|output_tokens" * ("message_start" in line)
                    self.events.append(re.sub(rf'"({moving})":\d+', "", line))
                    if len(self.events) == most:
                        if hold is None:
                            break
                        await hold.wait()
        return reply.status_code

    @property
    def again(self) -> Follower:
        """From the beginning."""
        other = Follower(self.path, self.body, self.headers)
        other.last = self.last.partition(".")[0] + ".0"
        return other


@pytest.mark.parametrize("seen", [0, 1, 2, 3])
async def test_events_are_numbered_and_those_the_client_has_left_out(seen: int) -> None:
    numbers = EventNumbers("s", seen)
    written = numbers.put(b"data: a\n\nevent: x\ndata: b\n\n") + numbers.put(b"") + numbers.put(b"data: c\n\n")
    expected = [b"id: s.1\ndata: a\n\n", b"id: s.2\nevent: x\ndata: b\n\n", b"id: s.3\ndata: c\n\n"]
    assert written == b"".join(expected[seen:])


@pytest.mark.parametrize(
    ("tokens", "reason", "expected"),
    [
        ([1], None, [([1], None)]),
        ([1, 2, 3], None, [([1], None), ([2], None), ([3], None)]),
        ([1, 2], "stop", [([1], None), ([2], "stop")]),
        ([1], "length", [([1], "length")]),
        ([1, 2], "timeout", [([1], None), ([2], None), ([], "timeout")]),
        ([1], "timeout", [([1], None), ([], "timeout")]),
        ([], "timeout", [([], "timeout")]),
    ],
)
async def test_tokens_are_read_one_by_one(
    tokens: list[int], reason: FinishReason | None, expected: Sequence[tuple[list[int], str | None]]
) -> None:
    singles = [one.delta for one in singly(Arrival(0, Delta("r", tokens, reason, cached_tokens=3), 0.0))]
    assert [(one.tokens, one.finish_reason) for one in singles] == expected
    assert [one.cached_tokens for one in singles][:1] == [3]


async def test_the_header_is_honoured_or_refused(serving: Serving) -> None:
    async with serving() as running:
        for header, body, status in (
            ("", {"stream": True}, 200),
            ("new", {"stream": True}, 200),
            ("new", {"stream": False}, 400),
            ("new", {"stream": True, "n": 2}, 400),
            ("new", {"stream": True, "server_tools": ["x"]}, 400),
            ("new", {"stream": True, "conversation": "conv_x"}, 400),
            ("x", {"stream": True}, 400),
            ("0" * 32 + ".3", {"stream": True}, 404),
        ):
            request = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **body}
            headers = {"last-event-id": header} if header else {}
            reply = await running.client.post("/v1/chat/completions", json=request, headers=headers)
            assert reply.status_code == status, (headers, body, reply.text)
            ids = [line for line in reply.text.splitlines() if line.startswith("id: ")]
            assert bool(ids) == (status == 200 and bool(headers))
            if status == 400 and (besides := set(body) - {"stream"}):
                assert besides == {reply.json()["error"]["param"]}


async def test_streams_of_every_api_go_on_after_a_broken_connection(
    serving: Serving, tmp_path: Path, text: TextModel
) -> None:
    async with gateways(serving, tmp_path, text) as running:

        async def break_off(name: str, number: int) -> None:
            client = Follower(*STREAMS[name])
            for most, gateway in ((1 + number, 0), (9 + number, number % 2), (None, 1)):
                status = await client.follow(running[gateway].client, most)
                assert status == 200, (name, most, client.events[-1:])
            whole = client.again
            assert await whole.follow(running[0].client) == 200, "what has ended is sent again"
            assert client.events == whole.events, name
            assert len(client.events) == int(client.last.partition(".")[2])

        await asyncio.gather(*(break_off(name, number) for number, name in enumerate(STREAMS)))
        await settled(running[0], len(STREAMS))


async def test_what_is_resumed_has_no_first_token_to_wait_for(
    serving: Serving, tmp_path: Path, text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Request] = []
    submit = ReplicaSet.submit

    def noted(self: ReplicaSet, request: Request, *rest: Any) -> str:
        sent.append(request)
        return submit(self, request, *rest)

    monkeypatch.setattr(ReplicaSet, "submit", noted)
    async with gateways(serving, tmp_path, text) as running:
        client = Follower(*STREAMS["chat"], headers={"x-slo-ttft-ms": "600000"})
        assert await client.follow(running[0].client, 5) == 200
        assert await client.follow(running[1].client) == 200
        first, resumed = sent
        assert first.patience_s is not None and not first.produced
        assert resumed.patience_s is None and resumed.produced


async def settled(gateway: Running, count: int) -> dict[str, Any]:
    return await until(lambda: total(gateway), lambda used: used.get("requests") == count)


async def test_a_connection_that_broke_unnoticed_gives_way(serving: Serving, tmp_path: Path, text: TextModel) -> None:
    async with gateways(serving, tmp_path, text, replicas=2) as running:
        old, hold = Follower(*STREAMS["chat"]), asyncio.Event()
        stuck = asyncio.create_task(old.follow(running[0].client, 5, hold))
        await eventually(lambda: len(old.events) == 5)
        new = Follower(*STREAMS["chat"])
        new.last = old.last
        for most in (10, 20, None):
            assert await new.follow(running[1].client, most) == 200
        hold.set()
        assert await stuck == 200
        assert "resumed_elsewhere" in old.events[-1]
        whole = new.again
        await whole.follow(running[0].client)
        assert [*old.events[:5], *new.events] == whole.events
        usage = json.loads(whole.events[-2].removeprefix("data: ").replace(",,", ","))["usage"]
        used = await total(running[0])
        assert (used["requests"], used["completion_tokens"]) == (1, usage["completion_tokens"])


async def test_a_claim_waits_for_the_replica_that_still_runs_the_stream(text: TextModel) -> None:
    """Another has the tokens of an earlier part."""
    backends = [InProcessBackend(ScriptedEngine(text), name=str(number)) for number in range(2)]
    earlier, running = Claimed("", found=True, request_id="c:0.0.1", tokens=[1]), Claimed("", running=True)
    for backend, answer in zip(backends, (earlier, running), strict=True):
        backend.claim = AsyncMock(return_value=answer)  # type: ignore[method-assign]
    claimed = await ReplicaSet("tiny", backends).claim("c", Request("q", [1], SamplingParams()))
    assert claimed.running and not claimed.found


async def test_nobody_comes_back(
    serving: Serving, tmp_path: Path, text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is charged as far as it got, once the client cannot come back."""
    monkeypatch.setattr("penstock.engine_host.tally.RESUME_S", 0.2)
    assert RESUME_S == 10.0, "what the documentation says"
    async with gateways(serving, tmp_path, text, step_s=0.05) as running:
        client = Follower(*STREAMS["chat"])
        await client.follow(running[0].client, 8)
        used = await settled(running[0], 1)
        assert 7 <= used["completion_tokens"] < len(SAID)
        assert await client.follow(running[1].client) == 404


async def test_only_the_same_user_resumes_and_it_counts_once(serving: Serving, tmp_path: Path, text: TextModel) -> None:
    tier = TierConfig(name="free", requests_per_minute=2, concurrent_requests=1, tokens_per_minute=900)
    async with gateways(serving, tmp_path, text, tiers=(tier,), default_tier="free") as running:
        gateway = running[0]
        await gateway.client.post("/v1/admin/tenants", json={"id": "acme"})
        admin = await make_key(gateway, user="root", scopes=["admin", "inference"])
        keys = {name: await make_key(gateway, admin, user=name) for name in ("ann", "bob")}
        client = Follower(*STREAMS["chat"], {"authorization": f"Bearer {keys['ann']}"})
        for most in (4, 8):
            assert await client.follow(gateway.client, most) == 200
        bob = client.again
        bob.headers = {"authorization": f"Bearer {keys['bob']}"}
        assert await bob.follow(gateway.client) == 404
        assert await client.follow(gateway.client) == 200
        assert client.events[-1] == "data: [DONE]"
        ann = {"authorization": f"Bearer {keys['ann']}"}
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
        replies = [await gateway.client.post("/v1/completions", json=body, headers=ann) for _ in range(2)]
        assert [reply.status_code for reply in replies] == [200, 429], "the stream was one request"
        left = int(replies[0].headers["x-ratelimit-remaining-tokens"])
        assert 900 - left < 2 * len(SAID), "its tokens count once"


async def test_a_stream_about_a_file_is_one_request_too(serving: Serving, tmp_path: Path, text: TextModel) -> None:
    tier = TierConfig(name="free", requests_per_minute=3, concurrent_requests=1)
    async with gateways(serving, tmp_path, text, tiers=(tier,), default_tier="free") as running:
        client = running[0].client
        await client.post("/v1/admin/tenants", json={"id": "acme"})
        headers = {"authorization": f"Bearer {await make_key(running[0], scopes=['admin', 'inference'])}"}
        file = {"type": "file", "file": {"file_data": base64.b64encode(b"Ann is 41.").decode()}}
        follower = Follower(
            "/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": [file]}]}, headers
        )
        for most in (4, 8, None):
            assert await follower.follow(client, most) == 200, "what it goes on with was counted"
        assert follower.events[-1] == "data: [DONE]"
        made_up = {**headers, "last-event-id": "0" * 32 + ".1"}
        replies = [await client.post(follower.path, json=follower.body, headers=made_up) for _ in range(2)]
        assert [reply.status_code for reply in replies] == [404, 429], "nor are files read for nothing again and again"


async def test_the_official_sdk_ignores_ids(serving: Serving) -> None:
    async with serving() as running:
        client = openai.AsyncOpenAI(base_url=f"{running.client.base_url}/v1", api_key="none", max_retries=0)
        said: list[str] = []
        for headers in ({}, {"Last-Event-ID": "new"}):
            stream = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                stream_options={"include_usage": True},
                extra_headers=headers,
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].usage is not None
            said.append("".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices))
            events = [
                event
                async for event in await client.responses.create(
                    model="tiny", input="hi", stream=True, extra_headers=headers
                )
            ]
            assert events[-1].type == "response.completed"
        assert said == ["Hello, world!"] * 2
        await client.close()
