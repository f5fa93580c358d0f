"""An HTTP server whose replies a test writes byte by byte, to speak the wire format of any other server."""

from __future__ import annotations

import asyncio
import json
import struct
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.backends.remote.chunk import Chunk
from penstock.backends.remote.server import RemoteServer
from penstock.backends.remote.upstream import Upstream

SSE = {"content-type": "text/event-stream"}
NDJSON = {"content-type": "application/x-ndjson"}
JSON = {"content-type": "application/json"}


@dataclass
class Asked:
    """A request that arrived."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Reply:
    """What is sent back; the connection is cut after the last part if `cut`."""

    parts: list[bytes] | bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: dict(SSE))
    cut: bool = False
    pause_s: float = 0.0
    """Between parts."""


def error(status: int, body: Any, **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(json.dumps(body).encode(), status, {**JSON, **named})


def reply_json(body: Any, **headers: str) -> Reply:
    return error(200, body, **headers)


def sse(*events: Any, kinds: bool = False, end: str = "\n", done: bool = False) -> bytes:
    """Server-sent events; `kinds`: with `event:` lines from the `type` of each."""
    found = ""
    for event in events:
        if kinds:
            found += f"event: {event['type']}{end}"
        found += f"data: {event if isinstance(event, str) else json.dumps(event)}{end}{end}"
    return (found + (f"data: [DONE]{end}{end}" if done else "")).encode()


def ndjson(*lines: Any) -> bytes:
    return b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines)


def message(payload: Any, **headers: str) -> bytes:
    """A message of Amazon's binary event stream."""
    named = {":content-type": "application/json", ":message-type": "event"}
    named |= {":" + name.replace("_", "-"): value for name, value in headers.items()}
    head = b"".join(
        struct.pack(">B", len(name)) + name.encode() + b"\x07" + struct.pack(">H", len(value)) + value.encode()
        for name, value in named.items()
    )
    body = json.dumps(payload).encode()
    prelude = struct.pack(">II", 16 + len(head) + len(body), len(head))
    whole = prelude + struct.pack(">I", zlib.crc32(prelude)) + head + body
    return whole + struct.pack(">I", zlib.crc32(whole))


class ScriptedServer:
    """Answers each request with what `script` returns for it."""

    def __init__(self, script: Callable[[Asked], Reply]) -> None:
        self.script = script
        self.asked: list[Asked] = []
        self.port = 0
        self._open: set[asyncio.Task[None]] = set()

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self.serve(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def close(self) -> None:
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode("latin-1").split("\r\n")
                method, target, _ = lines[0].split(" ")
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:] if line)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                asked = Asked(method, target, headers, body)
                self.asked.append(asked)
                reply = self.script(asked)
                more = "".join(f"{name}: {value}\r\n" for name, value in reply.headers.items())
                writer.write(f"HTTP/1.1 {reply.status} X\r\ntransfer-encoding: chunked\r\n{more}\r\n".encode())
                for part in [reply.parts] if isinstance(reply.parts, bytes) else reply.parts:
                    if part:
                        writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                    await writer.drain()
                    await asyncio.sleep(reply.pause_s)
                if reply.cut:
                    writer.transport.abort()
                    return
                writer.write(b"0\r\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def scripted(script: Callable[[Asked], Reply] | Reply) -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer(script if callable(script) else lambda asked: script)
    listening = await asyncio.start_server(server.accept, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        await server.close()


@asynccontextmanager
async def client(there: ScriptedServer, dialect: Any, **options: Any) -> AsyncIterator[RemoteServer]:
    """A client of a scripted server that speaks `dialect`."""
    model = options.pop("model", "m")
    timeout = options.pop("timeout_s", 5.0)
    url = there.root + options.pop("path", "")
    server = RemoteServer("0", Upstream(url, model, timeout_s=timeout, dialect=dialect, **options))
    await server.start()
    try:
        yield server
    finally:
        await server.close()


@dataclass
class Answer:
    """Chunks put together."""

    chunks: list[Chunk] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(choice.delta.content or "" for chunk in self.chunks for choice in chunk.choices)

    @property
    def thoughts(self) -> str:
        return "".join(choice.delta.reasoning_content or "" for chunk in self.chunks for choice in chunk.choices)

    @property
    def reason(self) -> str | None:
        found = [choice.finish_reason for chunk in self.chunks for choice in chunk.choices if choice.finish_reason]
        assert len(found) <= 1, found
        return found[0] if found else None

    @property
    def usage(self) -> tuple[int, int, int] | None:
        """Prompt, completion and cached tokens as last reported."""
        found = [chunk.usage for chunk in self.chunks if chunk.usage is not None]
        if not found:
            return None
        details = found[-1].prompt_tokens_details
        return found[-1].prompt_tokens, found[-1].completion_tokens, (details.cached_tokens or 0) if details else 0

    @property
    def calls(self) -> list[tuple[str | None, str | None, Any]]:
        """Id, name and arguments of each call."""
        found: dict[int, list[Any]] = {}
        for chunk in self.chunks:
            for choice in chunk.choices:
                for delta in choice.delta.tool_calls or ():
                    assert delta.function is not None
                    call = found.setdefault(delta.index, [delta.id, delta.function.name, ""])
                    call[2] += delta.function.arguments or ""
        assert sorted(found) == list(range(len(found)))
        return [(id, name, json.loads(arguments)) for id, name, arguments in (found[n] for n in sorted(found))]


async def ask(server: RemoteServer, operation: Any = "chat", **body: Any) -> Answer:
    """The answer to a request that fits."""
    if operation == "chat":
        body = {"messages": [{"role": "user", "content": "hi"}], **body}
    fitting = server.fit({**body, "stream": True, "stream_options": {"include_usage": True}}, operation)
    assert not fitting.refused, fitting.refused
    answer = Answer()
    async for chunk in server.stream(fitting.body, "req-1", operation):
        answer.chunks.append(chunk)
    return answer


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "clock"}},
]
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Rome and Oslo?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
            {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "c2", "content": "snow"},
    {"role": "user", "content": "And the time?"},
]
"""Parallel calls, their results, and what the user says next."""
