"""Bodies of every endpoint that takes one, against the real gateway with a scripted engine. Promises: a documented
status, never a 500 and nothing in the error log; errors in the format of the API; streams of well-formed events; and
nothing is left over: no admission slot, no concurrency, no open charge, no memory of bodies. The server answers a
well-formed request afterwards.

An input is a line with method and path, then the body."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema import TierConfig
from penstock.gateway.app.asgi import App
from penstock.gateway.http.request import ON_DISCONNECT
from penstock.gateway.process.endpoints import endpoints_of
from penstock.gateway.process.main import application
from penstock.metering.ledger import Ledger
from tests.fuzz import harness
from tests.gateway.conftest import Running, Serving, serving, text, until  # noqa: F401 (fixtures)
from tests.scripted import ScriptedEngine, make_text

DOCUMENTED = frozenset((200, 202, 400, 403, 404, 408, 409, 413, 415, 429, 503))
"""401 is not among them: the key stays good."""
AT_ONCE = 3
FORM = b"""--b\r
content-disposition: form-data; name="purpose"\r
\r
batch\r
--b\r
content-disposition: form-data; name="file"; filename="a.jsonl"\r
\r
{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "tiny", "messages": []}}\r
--b--\r
"""
USER = {"role": "user", "content": "hi"}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "enum": ["x", "y"]}, "b": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":"x"}'}}
OPENAPI = {
    "openapi": "3.1.0",
    "servers": [{"url": "http://127.0.0.1:9"}],
    "paths": {
        "/a/{b}": {
            "post": {
                "operationId": "f",
                "parameters": [{"name": "b", "in": "path", "required": True, "schema": {"type": "string"}}],
                "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/S"}}}},
            }
        }
    },
    "components": {"schemas": {"S": SCHEMA}},
}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "system", "content": "s"}, USER], "temperature": 0.5, "top_p": 0.9, "max_tokens": 4},
    {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}, "n": 2, "stop": ["a", "b"]},
    {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    {"messages": [USER], "response_format": {"type": "json_object"}, "seed": 1, "logprobs": True, "top_logprobs": 3},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
    },
    {"messages": [USER], "logit_bias": {"5": 1.5}, "min_p": 0.1, "top_k": 4, "repetition_penalty": 1.1, "user": "u"},
    {"messages": [USER], "service_tier": "flex", "metadata": {"a": "b"}, "store": False, "max_completion_tokens": 3},
]
BODIES: list[tuple[str, dict[str, Any]]] = [
    *(("POST /v1/chat/completions", {"model": "tiny", **chat}) for chat in CHATS),
    ("POST /v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 3, "echo": True, "logprobs": 2}),
    ("POST /v1/completions", {"model": "tiny", "prompt": [[1, 2], [3]], "stream": True, "suffix": None, "best_of": 1}),
    ("POST /v1/completions", {"model": "tiny", "prompt": ["a", "b"], "n": 2, "presence_penalty": 0.5, "seed": 3}),
    ("POST /v1/responses", {"model": "tiny", "input": "hi", "instructions": "i", "max_output_tokens": 5}),
    (
        "POST /v1/responses",
        {
            "model": "tiny",
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
            ],
            "stream": True,
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
            "store": True,
        },
    ),
    (
        "POST /v1/messages",
        {
            "model": "tiny",
            "max_tokens": 5,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": "x"}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}]},
            ],
            "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto"},
            "stop_sequences": ["x"],
            "stream": True,
        },
    ),
    ("POST /v1/messages/count_tokens", {"model": "tiny", "messages": [USER], "system": "s"}),
    ("POST /v1/embeddings", {"model": "minilm", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 3}),
    ("POST /v1/rerank", {"model": "minilm", "query": "q", "documents": ["a", "b"], "top_n": 1}),
    ("POST /v1/tokenize", {"model": "tiny", "prompt": "hi", "add_special_tokens": True}),
    ("POST /v1/tokenize", {"model": "tiny", "messages": [USER], "tools": [TOOL]}),
    ("POST /v1/detokenize", {"model": "tiny", "tokens": [1, 2, 3]}),
    (
        "POST /v1/batches",
        {"input_file_id": "file-a", "endpoint": "/v1/chat/completions", "completion_window": "24h", "metadata": {}},
    ),
    ("POST /v1/collections", {"name": "c", "chunk_tokens": 100, "overlap_tokens": 9}),
    ("POST /v1/collections/a/search", {"query": "q", "mode": "hybrid", "top_k": 3, "rerank": True}),
    (
        "POST /v1/collections/a/documents",
        {"name": "n", "text": "t", "media_type": "text/plain", "metadata": {"a": ""}},
    ),
    ("POST /v1/feedback", {"response_id": "chatcmpl-a", "rating": "up", "comment": "c"}),
    ("POST /v1/admin/tools", {"name": "t", "url": "http://127.0.0.1:9/", "openapi": OPENAPI, "headers": {"a": "b"}}),
    ("PATCH /v1/admin/adapters/a", {"pinned": True}),
    ("PATCH /v1/admin/routes/a", {"enabled": True, "share": 0.5}),
    ("POST /v1/admin/models", {"name": "m", "source": "tiny"}),
    ("POST /v1/admin/models/tiny/scale", {"replicas": 2}),
    ("POST /v1/admin/models/tiny/restart", {"replica": "0"}),
    ("POST /v1/admin/models/tiny/drain", {"replica": "0"}),
    ("POST /v1/admin/tenants", {"id": "other", "name": "n", "tier": "standard"}),
    ("PATCH /v1/admin/tenants/victim", {"name": "n", "disabled": False, "limits": {"requests_per_minute": 9}}),
    ("POST /v1/admin/keys", {"tenant": "victim", "scopes": ["inference"], "user": "u", "expires_at": 2000000000}),
    ("PATCH /v1/admin/keys/a", {"name": "n", "limits": {"tokens_per_minute": 9, "daily_budget": None}}),
]
SEEDS = [f"{line}\n".encode() + json.dumps(body).encode() for line, body in BODIES] + [b"POST /v1/files\n" + FORM]
GOOD = SEEDS[0]


def mutate(data: bytes, rng: random.Random, pool: Sequence[bytes]) -> bytes:
    line, _, body = data.partition(b"\n")
    if line == b"POST /v1/files":
        return line + b"\n" + harness.mutate_bytes(body, rng, pool)
    return line + b"\n" + harness.mutate_json(body, rng, pool)


class Target:
    def __init__(self, running: Running, key: str) -> None:
        self.running = running
        self.app: App = application(running.parts, endpoints_of(running.parts), "all")
        self.key = key

    async def ask(self, data: bytes) -> tuple[str, int, bytes, bytes]:
        """The path, the status, the media type and the body of the answer."""
        line, _, body = data.partition(b"\n")
        method, _, path = line.decode("latin-1").partition(" ")
        kind = b"multipart/form-data; boundary=b" if path == "/v1/files" else b"application/json"
        parts: list[bytes] = []
        replied: dict[str, Any] = {}
        left = [body]

        async def receive() -> dict[str, Any]:
            if left:
                return {"type": "http.request", "body": left.pop(), "more_body": False}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                replied.update(message)
            else:
                parts.append(message.get("body", b""))

        headers = [
            (b"host", b"localhost"),
            (b"content-type", kind),
            (b"authorization", f"Bearer {self.key}".encode()),
            (b"content-length", str(len(body)).encode()),
        ]
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            ON_DISCONNECT: lambda callback: None,
        }
        await self.app(scope, receive, send)
        return path, replied["status"], dict(replied["headers"])[b"content-type"], b"".join(parts)

    async def run(self, data: bytes) -> None:
        path, status, kind, body = await self.ask(data)
        assert status in DOCUMENTED, (status, body[:500])
        if kind.startswith(b"text/event-stream"):
            check_events(body)
            return
        assert kind == b"application/json", kind
        reply = json.loads(body)
        if status >= 400:
            error = reply["error"]
            wanted = {"type", "message"} if path.startswith("/v1/messages") else {"message", "type", "param", "code"}
            assert wanted <= set(error) and isinstance(error["message"], str) and error["message"], reply
            assert "failed on this request" not in error["message"]

    async def check_left_over(self) -> None:
        parts = self.running.parts
        admission = parts.admissions._admission
        assert admission is not None
        held = [controller.queue.held for controller in admission._controllers.values()]  # type: ignore[attr-defined]
        assert all(slots == 0 for slots, _ in held), held
        assert (parts.bodies.in_memory, parts.bodies.on_disk) == (0, 0)
        assert self.running.engine.load_snapshot().running == 0
        answers = await asyncio.gather(*(self.ask(GOOD) for _ in range(AT_ONCE)))
        assert [status for _, status, _, _ in answers] == [200] * AT_ONCE, answers


def check_events(body: bytes) -> None:
    """Each event has data that is JSON, or the end."""
    events = body.decode().split("\n\n")
    assert events.pop() == ""
    for event in events:
        for line in event.split("\n"):
            name, colon, value = line.partition(":")
            assert name in ("", "data", "event", "id", "retry") and colon, line
            if name == "data" and value != " [DONE]":
                assert "failed on this request" not in json.dumps(json.loads(value))


@pytest.mark.parametrize("seconds", harness.DURATIONS)
def test_json(
    seconds: float,
    serving: Serving,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    caplog.set_level(logging.ERROR)
    stack = AsyncExitStack()
    model = make_text(tmp_path, context_length=4096)
    settings: dict[str, Any] = {
        "store_url": f"sqlite:///{tmp_path}/store.db",
        "default_tier": "standard",
        "tiers": (TierConfig(name="standard", concurrent_requests=AT_ONCE),),
        "time_limit_s": 1.0,
        "engine_wait_s": 0.5,
    }

    async def start() -> Target:
        running = await stack.enter_async_context(
            serving(ScriptedEngine(model, "Hi {", max_model_len=4096), model, **settings)
        )
        for tenant in ("acme", "victim"):
            await running.client.post("/v1/admin/tenants", json={"id": tenant})
        scopes = {"tenant": "acme", "scopes": ["admin", "inference", "metrics"]}
        reply = await running.client.post("/v1/admin/keys", json=scopes)
        return Target(running, reply.json()["key"])

    async def finish(target: Target) -> None:
        await target.check_left_over()
        database = target.running.parts.database
        assert database is not None
        await until(Ledger(database).open_charges, lambda left: not left)

    try:
        target = loop.run_until_complete(start())
        count = 0

        def run(data: bytes) -> None:
            nonlocal count
            count += 1
            caplog.clear()
            loop.run_until_complete(target.run(data))
            if count % 50 == 0:
                loop.run_until_complete(target.check_left_over())
            assert not caplog.records, caplog.text

        harness.fuzz("json", run, SEEDS, seconds=seconds, quick=1200, mutate=mutate, limit_s=3.0)
        loop.run_until_complete(finish(target))
    finally:
        loop.run_until_complete(stack.aclose())
        loop.close()
        asyncio.set_event_loop(None)
