"""The attacks of `penstock bench hostile`. Each runs until it is cancelled, from a process of its own.

    python -m penstock.bench.hostile.attacks NAME URL KEY MODEL COLLECTION

An attack needs nothing but a socket and, most of them, the key of an ordinary tenant. What the server answered is
counted, and printed as JSON when the process is told to stop.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from penstock.bench.wire import Target

MIB = 1 << 20


@dataclass(slots=True)
class Attacker:
    """Where the server is, and what it has answered so far."""

    target: Target
    model: str
    collection: str
    answers: Counter[str] = field(default_factory=Counter)

    def head(self, path: str, *lines: str, method: str = "POST") -> bytes:
        rows = [f"{method} {path} HTTP/1.1", f"Host: {self.target.host}:{self.target.port}", *lines]
        if self.target.api_key:
            rows.append(f"Authorization: Bearer {self.target.api_key}")
        return ("\r\n".join(rows) + "\r\n\r\n").encode()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection(self.target.host, self.target.port, limit=MIB)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def post(self, path: str, body: bytes, content_type: str = "application/json") -> None:
        """One request on a connection of its own; its status is counted."""
        head = self.head(path, f"Content-Type: {content_type}", f"Content-Length: {len(body)}", "Connection: close")
        async with self.connection() as (reader, writer):
            writer.write(head + body)
            status = (await reader.readline()).split(b" ")
            self.answers[status[1].decode() if len(status) > 1 else "closed"] += 1
            while await reader.read(1 << 16):
                continue

    async def steadily(self, per_second: float, send: Callable[[], Awaitable[None]], at_once: int = 40) -> None:
        """`send` so many times a second, whether or not the earlier ones have been answered, up to `at_once`."""
        room = asyncio.Semaphore(at_once)

        async def one() -> None:
            try:
                await send()
            except (OSError, asyncio.IncompleteReadError, ValueError) as error:
                self.answers[type(error).__name__] += 1
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            while True:
                await room.acquire()
                group.create_task(one())
                await asyncio.sleep(1 / per_second)

    async def crowd(self, count: int, one: Callable[[], Awaitable[None]]) -> None:
        """`count` connections at once, each opened again after it was closed."""

        async def member() -> None:
            while True:
                with suppress(OSError, asyncio.IncompleteReadError, ValueError):
                    await one()
                self.answers["closed"] += 1
                await asyncio.sleep(0.2)

        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(member())

    def chat(self, content: str = "hi", **fields: object) -> bytes:
        body = {"model": self.model, "max_tokens": 4, "messages": [{"role": "user", "content": content}], **fields}
        return json.dumps(body).encode()


Attack = Callable[[Attacker], Awaitable[None]]
ATTACKS: dict[str, Attack] = {}


def attack(name: str) -> Callable[[Attack], Attack]:
    def register(function: Attack) -> Attack:
        ATTACKS[name] = function
        return function

    return register


@attack("regex-bomb")
async def regex_bomb(attacker: Attacker) -> None:
    """Patterns of 40 and 200 KB that need gigabytes of states."""
    bodies = [attacker.chat(response_format={"type": "regex", "regex": "a?" * n}) for n in (20_000, 100_000)]
    counted = attacker.chat(response_format={"type": "regex", "regex": "((a{1,900}b){1,900}c){1,900}"})
    bodies.append(counted)
    turn = iter(range(1 << 60))
    await attacker.steadily(5, lambda: attacker.post("/v1/chat/completions", bodies[next(turn) % len(bodies)]))


@attack("schema-bomb")
async def schema_bomb(attacker: Attacker) -> None:
    """Schemas that double with every `$ref`, are nested deeply, or ask for enormous counts."""
    doubling: dict[str, object] = {
        f"d{n}": {"type": "object", "properties": {k: {"$ref": f"#/$defs/d{n + 1}"} for k in "ab"}} for n in range(30)
    }
    doubling["d30"] = {"type": "string", "pattern": "(a|b)*a(a|b){24}"}
    deep: dict[str, object] = {"type": "integer"}
    for _ in range(400):
        deep = {"type": "array", "items": deep, "minItems": 1}
    schemas: list[object] = [
        {"$ref": "#/$defs/d0", "$defs": doubling},
        deep,
        {"type": "array", "items": {"type": "string", "maxLength": 100_000}, "minItems": 100_000},
        {"enum": [f"{n:06d}" * 20 for n in range(20_000)]},
    ]
    forms = [{"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} for schema in schemas]
    bodies = [attacker.chat(response_format=form) for form in forms]
    turn = iter(range(1 << 60))
    await attacker.steadily(5, lambda: attacker.post("/v1/chat/completions", bodies[next(turn) % len(bodies)]))


@attack("costly-grammars")
async def costly_grammars(attacker: Attacker) -> None:
    """Grammars inside the limits on their size that are slow to compile or to follow, each one new."""
    doubled = "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(24))
    number = iter(range(1 << 60))

    async def send() -> None:
        n = next(number)
        forms: list[dict[str, object]] = [
            {"type": "regex", "regex": f"(a?){{{300 + n % 50}}}a{{300}}"},
            {"type": "regex", "regex": f"(x{{90}}){{{100 + n % 10}}}"},
            {"type": "regex", "regex": f"(.*a.{{50}}){{10}}{n}"},
            {"type": "grammar", "grammar": f'start: T0 "{n}"\n{doubled}\nT24: "a"'},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"multipleOf": 90_001 + n}}},
            {"type": "choice", "choice": [f"{n} {i}" for i in range(10_000)]},
        ]
        await attacker.post("/v1/chat/completions", attacker.chat(response_format=forms[n % len(forms)]))

    await attacker.steadily(10, send, at_once=8)


@attack("long-chat")
async def long_chat(attacker: Attacker) -> None:
    """Chats of 4 MiB that cannot fit the context window, ten a second."""
    body = attacker.chat("the quick brown fox " * (4 * MIB // 20 - 100))
    await attacker.steadily(10, lambda: attacker.post("/v1/chat/completions", body))


@attack("long-arguments")
async def long_arguments(attacker: Attacker) -> None:
    """4 MiB inside the arguments of an earlier tool call, ten a second."""
    arguments = json.dumps({"a": "word " * (4 * MIB // 5 - 400)})
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
    ]
    body = attacker.chat(messages=messages)
    await attacker.steadily(10, lambda: attacker.post("/v1/chat/completions", body))


@attack("tokenize")
async def tokenize(attacker: Attacker) -> None:
    """`/v1/tokenize` and `/v1/messages/count_tokens` of 4 MiB and of 600 KB, ten a second."""
    text = "lorem ipsum " * (4 * MIB // 12 - 100)
    sent: list[tuple[str, dict[str, object]]] = [
        ("/v1/tokenize", {"prompt": text}),
        ("/v1/tokenize", {"prompt": text[: 600 << 10]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": text}]}),
    ]
    bodies = [(path, json.dumps({"model": attacker.model, **fields}).encode()) for path, fields in sent]
    turn = iter(range(1 << 60))
    await attacker.steadily(10, lambda: attacker.post(*bodies[next(turn) % len(bodies)]))


@attack("ingest")
async def ingest(attacker: Attacker) -> None:
    """Documents of 2 MB for a collection: plain text, and HTML that consists of unclosed comments."""
    path = f"/v1/collections/{attacker.collection}/documents"
    number = iter(range(1 << 60))

    async def send() -> None:
        n = next(number)
        text = f"document {n} " + ("<!--" * 400_000 if n % 2 else "lorem ipsum dolor sit amet " * 70_000)
        name = f"d{n}.html" if n % 2 else f"d{n}.txt"
        form = (
            f'--x\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
            f"Content-Type: {'text/html' if n % 2 else 'text/plain'}\r\n\r\n{text}\r\n--x--\r\n"
        )
        await attacker.post(path, form.encode(), "multipart/form-data; boundary=x")

    await attacker.steadily(2, send, at_once=8)


@attack("pipelining")
async def pipelining(attacker: Attacker) -> None:
    """192 KB of pipelined requests for a console file on each of ten connections that never read; no key."""
    request = f"GET /console/ HTTP/1.1\r\nHost: {attacker.target.host}:{attacker.target.port}\r\n\r\n".encode()

    async def one() -> None:
        async with attacker.connection() as (_, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(request * (192 * 1024 // len(request)))
            with suppress(TimeoutError):
                await asyncio.wait_for(writer.drain(), 30)
            await asyncio.sleep(30)

    await attacker.crowd(10, one)


@attack("trailers")
async def trailers(attacker: Attacker) -> None:
    """A chunked body followed by trailers without end."""
    head = attacker.head("/v1/chat/completions", "Content-Type: application/json", "Transfer-Encoding: chunked")
    piece = b"".join(b"x-t%d: %s\r\n" % (n, b"v" * 100) for n in range(600))

    async def one() -> None:
        async with attacker.connection() as (_, writer):
            writer.write(head + b"2\r\n{}\r\n0\r\n")
            for _ in range(3000):
                writer.write(piece)
                await writer.drain()

    await attacker.crowd(3, one)


@attack("idle-uploads")
async def idle_uploads(attacker: Attacker) -> None:
    """Forty uploads that send one byte a second."""
    lines = ("Content-Type: multipart/form-data; boundary=x", "Content-Length: 1000000")
    head = attacker.head("/v1/files", *lines)

    async def one() -> None:
        async with attacker.connection() as (_, writer):
            writer.write(head + b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n')
            while True:
                writer.write(b"b")
                await writer.drain()
                await asyncio.sleep(1)

    await attacker.crowd(40, one)


@attack("slow-heads")
async def slow_heads(attacker: Attacker) -> None:
    """Three hundred connections whose request heads never end; no key."""

    async def one() -> None:
        async with attacker.connection() as (_, writer):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n")
            while True:
                writer.write(b"x-a: b\r\n")
                await writer.drain()
                await asyncio.sleep(2)

    await attacker.crowd(300, one)


@attack("wrong-keys")
async def wrong_keys(attacker: Attacker) -> None:
    """Two hundred guessed keys a second."""
    number = iter(range(1 << 60))
    body = attacker.chat()

    async def send() -> None:
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {attacker.target.host}:{attacker.target.port}\r\n"
            f"Authorization: Bearer sk-guess-{next(number):040d}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        async with attacker.connection() as (reader, writer):
            writer.write(head.encode() + body)
            attacker.answers[(await reader.readline()).decode().split(" ")[1]] += 1

    await attacker.steadily(200, send)


@attack("hang-ups")
async def hang_ups(attacker: Attacker) -> None:
    """Twenty streams a second whose client hangs up as soon as the first bytes arrive."""
    body = attacker.chat("Tell me a story.", stream=True, max_tokens=400)

    async def send() -> None:
        head = attacker.head("/v1/chat/completions", "Content-Type: application/json", f"Content-Length: {len(body)}")
        async with attacker.connection() as (reader, writer):
            writer.write(head + body)
            attacker.answers[(await reader.readline()).decode().split(" ")[1]] += 1

    await attacker.steadily(20, send)


async def run(name: str, attacker: Attacker) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    async def attack_() -> None:
        await ATTACKS[name](attacker)

    task = asyncio.create_task(attack_())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    print(json.dumps(attacker.answers), flush=True)


if __name__ == "__main__":
    _, chosen, url, key, model, collection = sys.argv
    asyncio.run(run(chosen, Attacker(Target.parse(url, key), model, collection)))
