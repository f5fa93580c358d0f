"""R-GW-4 and WIRE: disconnects, slow readers, keep-alives, early and late errors, time limits."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from typing import Any

import httpx
import pytest

from penstock.engine.request import Delta
from penstock.text import TextModel
from tests.gateway.conftest import Running, Serving, events, eventually, until
from tests.scripted import ScriptedEngine


def raw_request(gateway: Running, **body: Any) -> bytes:
    data = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **body}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_client_that_leaves_stops_its_generation(
    serving: Serving, text: TextModel, stream: bool, phase: str
) -> None:
    engine = ScriptedEngine(text, "word " * 5000, step_s=0.002, max_model_len=100_000)
    engine.hold = phase == "prefill"
    async with serving(engine) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(raw_request(gateway, stream=stream))
        await eventually(lambda: engine.load_snapshot().running == 1)
        if stream and phase == "decode":
            await reader.readuntil(b"content")
        writer.close()
        await eventually(lambda: engine.load_snapshot().running == 0)
        await eventually(lambda: gateway.parts.metrics.disconnects.value == 1)
        assert len(engine.aborted) == 1


async def test_a_failure_before_the_first_token_is_a_real_status_code(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text)
    engine.hold = True
    async with serving(engine) as gateway:
        task = asyncio.create_task(gateway.chat(stream=True))
        await eventually(lambda: bool(engine.seen))
        engine._deltas.append(Delta(engine.seen[0].request_id, finish_reason="error", error="kaput"))
        reply = await task
        assert reply.status_code == 500
        assert reply.json()["error"]["message"] == "kaput"


async def test_the_stream_opens_with_comments_when_the_first_token_takes_long(
    serving: Serving, text: TextModel
) -> None:
    engine = ScriptedEngine(text)
    engine.hold = True
    async with serving(engine, hold_status_s=0.05, keep_alive_s=0.02) as gateway:
        async with gateway.client.stream(
            "POST",
            "/v1/chat/completions",
            json={"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True},
        ) as reply:
            assert reply.status_code == 200
            body = ""
            async for part in reply.aiter_text():
                body += part
                if body.count(": keep-alive\n\n") == 2:
                    engine.hold = False
        assert body.index('"role":"assistant"') < body.index(": keep-alive")
        assert events(body)[-1] == "[DONE]"


async def test_an_error_after_the_first_byte_is_one_data_line_and_no_done(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text, "word " * 1000, step_s=0.002, max_model_len=100_000)
    async with (
        serving(engine) as gateway,
        gateway.client.stream(
            "POST",
            "/v1/chat/completions",
            json={"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True},
        ) as reply,
    ):
        body = ""
        async for part in reply.aiter_text():
            if not body:
                engine._deltas.append(Delta(engine.seen[0].request_id, finish_reason="error", error="kaput"))
            body += part
        assert json.loads(events(body)[-1]) == {
            "error": {"message": "kaput", "type": "server_error", "param": None, "code": "server_error"}
        }


async def test_a_slow_reader_holds_up_nobody_and_costs_little(serving: Serving, text: TextModel) -> None:
    """Its tokens gather in one merged delta while its socket is full, and all of them arrive in the end."""
    count = 12_000
    engine = ScriptedEngine(
        text, lambda request: [10] * (count if len(request.prompt) == 6 else 20), max_model_len=10**6
    )
    async with serving(engine, time_limit_s=None) as gateway:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", gateway.port))
        slow.sendall(
            raw_request(
                gateway,
                stream=True,
                logprobs=True,
                top_logprobs=5,
                messages=[{"role": "user", "content": "abc"}],
            )
        )
        await eventually(lambda: bool(engine.seen))
        for _ in range(5):
            assert (await gateway.chat()).status_code == 200
        await eventually(lambda: engine.load_snapshot().running == 0)

        def drain() -> bytes:
            data = b""
            while not data.endswith(b"0\r\n\r\n"):
                data += slow.recv(1 << 20)
            return data

        data = await asyncio.to_thread(drain)
        slow.close()
        assert data.count(b'"token":"+"') >= count
        assert b"[DONE]" in data


async def test_a_client_that_never_reads_is_given_up(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text, lambda request: [10] * 30_000, max_model_len=10**6)
    async with serving(engine, time_limit_s=None, stalled_reader_s=0.3) as gateway:
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", gateway.port))
        stuck.sendall(raw_request(gateway, stream=True, logprobs=True, top_logprobs=5))
        await eventually(lambda: gateway.parts.metrics.stalled_readers.value == 1)
        await eventually(lambda: engine.load_snapshot().running == 0)
        stuck.close()


async def test_the_time_limit_ends_an_answer_with_what_it_has(
    serving: Serving, text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even when the engine does not keep its own deadline."""
    monkeypatch.setattr("penstock.gateway.generation.engine.GRACE_S", 0.0)
    engine = ScriptedEngine(text, "word " * 5000, step_s=0.005, max_model_len=100_000)
    async with serving(engine, time_limit_s=0.3) as gateway:

        def begun(reply: httpx.Response) -> bool:
            return reply.status_code != 408  # a busy machine may have no token in that time

        reply = await until(gateway.chat, begun)
        [choice] = reply.json()["choices"]
        said = choice["message"]["content"]
        assert said and ("word " * 5000).startswith(said)
        assert choice["finish_reason"] == "length"
        assert choice["stop_reason"] == "time_limit"
        assert reply.headers["x-penstock-limit"] == "time_limit"
        reply = await until(lambda: gateway.chat(stream=True), begun)
        assert "x-penstock-limit" not in reply.headers, "they are gone by then"
        *_, comment, end = reply.text.rstrip().split("\n\n")
        assert comment == ": x-penstock-limit: time_limit\n: x-penstock-limit-scope: server"
        assert end == "data: [DONE]"
        assert json.loads(events(reply.text)[-2])["choices"][0]["stop_reason"] == "time_limit"
        await eventually(lambda: engine.load_snapshot().running == 0)


async def test_no_token_in_the_time_allowed_is_a_408(
    serving: Serving, text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.gateway.generation.engine.GRACE_S", 0.0)
    engine = ScriptedEngine(text)
    engine.hold = True
    async with serving(engine, time_limit_s=0.1) as gateway:
        reply = await gateway.chat(stream=True)
        assert reply.status_code == 408
        assert reply.json()["error"]["type"] == "timeout_error"
        await eventually(lambda: engine.load_snapshot().running == 0)


async def test_many_streams_with_random_departures_leave_nothing_behind(serving: Serving, text: TextModel) -> None:
    rng = random.Random(1)
    engine = ScriptedEngine(text, "word " * 40, step_s=0.001)

    async def one(gateway: Running) -> None:
        leave_after = rng.choice([None, 0.0, 0.01, 0.05, 0.1])
        try:
            async with asyncio.timeout(leave_after):
                reply = await gateway.chat(stream=True)
                assert events(reply.text)[-1:] == ["[DONE]"], (reply.status_code, reply.text)
        except TimeoutError:
            pass

    async with serving(engine) as gateway:
        await asyncio.gather(*(one(gateway) for _ in range(64)))
        await eventually(lambda: engine.load_snapshot().running == 0)
        await eventually(lambda: gateway.parts.registry.route("tiny").model.backend.in_flight == 0)
        assert (await gateway.chat()).status_code == 200
