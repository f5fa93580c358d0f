"""Raw bytes on a connection. Promises: no exception escapes; what a connection holds is bounded; everything written is
well-formed HTTP, with one final answer per request at most; a first request that another parser (h11) reads too means
the same to both, so that nothing can be smuggled past a proxy; the server answers a well-formed request afterwards.

Most inputs go to the protocol class through a transport in memory, cut into pieces in various ways, some of them from a
client that never reads; one in twenty also goes over a real socket."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import h11
import pytest

from penstock.gateway.http.connection import BODY_AHEAD, MOST_WAITING, PIECE, UNSENT, Connection
from penstock.gateway.http.connections import Connections
from penstock.gateway.http.listener import Listener
from penstock.gateway.http.request import Message, Scope
from tests.fuzz import harness
from tests.gateway.http.test_hostile_clients import JAVA
from tests.ports import free_port

HEAD_LIMIT = 4096
READ = 2**18
"""The most that event loops read at once."""
GOOD = b"GET /good HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
POST = b"POST /echo HTTP/1.1\r\nhost: localhost:8000\r\n"
SEEDS = [
    GOOD,
    b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n" * 3,
    b"GET /stream?a=b%20c HTTP/1.1\r\nHost: [::1]:80\r\nAccept: text/html\r\nUser-Agent: a\r\n\r\n" + GOOD,
    b"GET / HTTP/1.0\r\n\r\n",
    b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\nHEAD /stream HTTP/1.0\r\n\r\n",
    b"HEAD /large HTTP/1.1\r\nhost: x\r\n\r\n" + GOOD,
    b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET http://user@example.com:80/a?b#c HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET http://example.com HTTP/1.1\r\nhost: x\r\n\r\n",
    b"DELETE /v1/files/a HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",
    POST + b"content-length: 5\r\n\r\nhello" + GOOD,
    POST + b"content-length: 5\r\nexpect: 100-continue\r\n\r\nhello",
    POST + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n6;a=b\r\n world\r\n0\r\n\r\n" + GOOD,
    POST + b"transfer-encoding: chunked\r\ntrailer: x-a\r\n\r\n1\r\na\r\n0\r\nx-a: b\r\nx-c: d\r\n\r\n" + GOOD,
    POST + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 2000,
    POST + b"content-length: 300000\r\n\r\n" + b"x" * 300_000 + GOOD,
    b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 50000\r\n\r\n" + b"x" * 40_000,
    b"POST /crash HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\na" + GOOD,
    b"GET /half HTTP/1.1\r\nhost: x\r\n\r\n",
    JAVA + b'{"model":"tiny"}' + GOOD,
    JAVA.replace(b"Content-Length: 16", b"Transfer-Encoding: chunked") + b"3\r\nabc\r\n0\r\n\r\n" + GOOD,
    b"GET /ws HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-key: a\r\n\r\n\x81",
    b"CONNECT a:443 HTTP/1.1\r\nhost: a:443\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(250)) + b"\r\n",
    b"GET /good HTTP/1.1\r\nhost: x\r\n\r\n" * 200,
]
PIECES = [
    b"content-length: 3\r\n", b"content-length: 03\r\n", b"content-length: -1\r\n", b"content-length : 3\r\n",
    b"transfer-encoding: chunked\r\n", b"transfer-encoding: chunked\r\n ,identity\r\n",
    b"transfer-encoding:chunked \r\n", b"transfer-encoding: gzip, chunked\r\n", b"Transfer-Encoding: cHUNKED\r\n",
    b"connection: close\r\n", b"connection: keep-alive, upgrade\r\n", b"upgrade: h2c\r\n", b"host: y\r\n",
    b"host:\r\n", b"expect: 100-continue\r\n", b" folded\r\n", b"\r", b"\n", b"\r\n\r\n", b"0\r\n\r\n",
    b"ffffffffffffffff\r\n", b"0000000000\r\n", b";a=\"b\"\r\n", b"HTTP/1.0", b"HTTP/1.1", b"HTTP/2.0", b"HTTP/0.9",
    b"POST", b"CONNECT", b"/large", b"/stream", b"/early", b"*", b"http://a/", GOOD, b"x" * 5000, b"a: b\r\n" * 300,
    b"\x00", b"\xff",
]  # fmt: skip


def mutate(data: bytes, rng: random.Random, pool: Sequence[bytes]) -> bytes:
    """Half of the edits are made of what HTTP consists of."""
    if rng.random() < 0.5:
        return harness.mutate_bytes(data, rng, pool)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(min(len(data), rng.choice((500, len(data)))) + 1)
        if rng.random() < 0.7:
            at = data.find(b"\n", at) + 1  # the beginning of a line
        data = data[:at] + rng.choice(PIECES) + data[at + rng.choice((0, 0, 0, 1, 4)) :]
    return data


class App:
    """Echoes and counts; some paths reply in other ways."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes, bytes]] = []

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        path = scope["path"]
        if path == "/early":
            await _reply(send, b"early")
            return
        body, more = b"", True
        while more:
            message: Message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        self.seen.append((scope["method"], scope["raw_path"], body))
        if path == "/crash":
            raise ValueError("crash")
        if path == "/large":
            await _reply(send, b"x" * 400_000)
        elif path in ("/stream", "/half"):
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
            for _ in range(3):
                await send({"type": "http.response.body", "body": b"part", "more_body": True})
            if path == "/half":
                raise ValueError("half")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await _reply(send, body[:100] or b"empty")

    async def failed(self, error: Exception, scope: Scope, receive: Any, send: Any) -> None:
        if not isinstance(error, ValueError):
            raise AssertionError("the application failed") from error
        if send is not None:
            await _reply(send, b"failed", 500)


async def _reply(send: Any, body: bytes, status: int = 200) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Wire(asyncio.Transport):
    """A transport in memory, as event loops make them; `deaf`: nobody reads what is written."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, deaf: bool) -> None:
        super().__init__()
        self.loop, self.deaf = loop, deaf
        self.protocol: Connection
        self.sent = bytearray()
        self.waiting = 0
        self.reading = True
        self.closed = self.aborted = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else None

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == UNSENT

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def write(self, data: Any) -> None:
        assert not self.closed or self.aborted, "written after closing"
        self.sent += data
        if self.deaf:
            self.waiting += len(data)
            assert self.waiting <= UNSENT + PIECE + 1024, "more is buffered than a connection may hold"
            if self.waiting > UNSENT:
                self.protocol.pause_writing()

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.reading = False
            if not self.waiting:
                self.loop.call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.aborted = True
        lost, self.closed = self.closed and not self.waiting, True
        self.reading = False
        if not lost:
            self.loop.call_soon(self.protocol.connection_lost, None)


def cut(data: bytes) -> Iterator[bytes]:
    """The pieces in which an input arrives: whole, in two, or in many; the same for the same input."""
    digest = zlib.crc32(data)
    size = (READ, max(len(data) // 2, 1), 1 + digest % 900, 7)[digest % 4 if len(data) < 20_000 else digest % 2]
    size = min(size, READ)
    return (data[at : at + size] for at in range(0, len(data), size))


class Target:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.escaped: list[Any] = []
        self.loop.set_exception_handler(lambda _, context: self.escaped.append(context))
        self.count = 0
        self.port = free_port()
        self.listener: Listener
        self.loop.run_until_complete(self.start())

    async def start(self) -> None:
        app = App()
        limits: Any = {"head_limit": HEAD_LIMIT, "receive_s": 60.0, "stalled_reader_s": 60.0}
        self.listener = Listener(app, app.failed, "127.0.0.1", self.port, room=100, **limits)
        await self.listener.start()
        self.app = App()
        self.shared = Connections(self.app, self.app.failed, room=9, room_per_address=None, **limits)

    def close(self) -> None:
        self.loop.run_until_complete(self.listener.close(0.1))
        self.loop.close()

    def run(self, data: bytes) -> None:
        self.count += 1
        self.loop.run_until_complete(self.in_memory(data, deaf=zlib.crc32(data) % 5 == 0))
        if self.count % 20 == 0:
            self.loop.run_until_complete(self.over_a_socket(data))
        assert not self.escaped, self.escaped

    async def in_memory(self, data: bytes, *, deaf: bool) -> None:
        self.app.seen.clear()
        connection, wire = Connection(self.shared), Wire(self.loop, deaf=deaf)
        wire.protocol = connection
        connection.connection_made(wire)
        for part in cut(data):
            for _ in range(20):
                if wire.reading or wire.closed:
                    break
                await asyncio.sleep(0)
            if wire.closed or (deaf and not wire.reading):
                break
            connection.data_received(part)
            waiting = connection._waiting
            held = sum(request.buffered for request in (*waiting, connection._coming) if request is not None)
            assert len(waiting) <= MOST_WAITING and held <= BODY_AHEAD + READ
            await asyncio.sleep(0)
        for _ in range(600 if not deaf else 20):
            if wire.closed or not self.shared.tasks:
                break
            await asyncio.sleep(0)
        if not deaf:
            answers = finals(bytes(wire.sent), complete=not wire.aborted)
            assert answers <= len(self.app.seen) + data.count(b"/early") + 1, "more answers than requests"
            self.compare(data)
        connection.abort()
        for _ in range(5):
            await asyncio.sleep(0)
        assert connection not in self.shared.open and not self.shared.of_address
        for task in list(self.shared.tasks):
            await asyncio.wait_for(task, 60)

    def compare(self, data: bytes) -> None:
        theirs = first_by_h11(data)
        if theirs is not None and self.app.seen and theirs[1].startswith(b"/") and b"/early" not in data:
            assert self.app.seen[0] == theirs, f"read differently: {self.app.seen[0]} and {theirs}"

    async def over_a_socket(self, data: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 60)
        except (ConnectionError, OSError):
            pass
        finally:
            writer.close()
        with socket.socket() as probe:
            probe.setblocking(False)
            await self.loop.sock_connect(probe, ("127.0.0.1", self.port))
            await self.loop.sock_sendall(probe, GOOD)
            got = b""
            while part := await asyncio.wait_for(self.loop.sock_recv(probe, 65536), 60):
                got += part
        assert got.startswith(b"HTTP/1.1 200 OK\r\n") and got.endswith(b"\r\n\r\nempty"), got


def first_by_h11(data: bytes) -> tuple[str, bytes, bytes] | None:
    """The first request as another parser reads it; None if it refuses it or it is incomplete."""
    other = h11.Connection(h11.SERVER, max_incomplete_event_size=10**6)
    head, body = None, b""
    try:
        other.receive_data(data)
        while True:
            event = other.next_event()
            if isinstance(event, h11.Request):
                head = event.method.decode(), event.target.partition(b"?")[0]
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return None if head is None else (*head, body)
            else:
                return None
    except h11.RemoteProtocolError:
        return None


def finals(sent: bytes, *, complete: bool) -> int:
    """How many final answers `sent` has; raises when they are not well-formed. Only the last may be incomplete, or end
    with the connection."""
    found = 0
    while sent:
        head, end, rest = sent.partition(b"\r\n\r\n")
        assert end, sent[:200]
        line, *lines = head.split(b"\r\n")
        assert line.startswith(b"HTTP/1.1 ") and line[9:12].isdigit() and line[12:13] == b" ", line
        status = int(line[9:12])
        assert all(b": " in field and field.partition(b":")[0].strip() == field.partition(b":")[0] for field in lines)
        fields = {name.lower(): value for name, _, value in (field.partition(b": ") for field in lines)}
        assert status < 600 and len(fields) == len(lines), "a header is repeated"
        if status == 100:
            sent = rest
            continue
        found += 1
        if b"transfer-encoding" in fields:
            assert fields[b"transfer-encoding"] == b"chunked" and b"content-length" not in fields
            sent = _after_chunks(rest, complete=complete)
        elif b"content-length" in fields:
            length = int(fields[b"content-length"])
            # The body of an answer to HEAD is not sent.
            if rest and not rest.startswith(b"HTTP/1.1 "):
                assert len(rest) >= length or not complete
                rest = rest[length:]
            sent = rest
        else:
            assert fields.get(b"connection") == b"close", "nothing says where it ends"
            return found
        if fields.get(b"connection") == b"close":
            assert not sent, "something follows the last answer"
    return found


def _after_chunks(rest: bytes, *, complete: bool) -> bytes:
    while rest and not rest.startswith(b"HTTP/1.1 "):  # no body: an answer to HEAD
        size, end, after = rest.partition(b"\r\n")
        if not end:
            assert not complete
            return b""
        length = int(size, 16)
        assert after[length : length + 2] == b"\r\n" or not complete
        rest = after[length + 2 :]
        if length == 0:
            break
    return rest


@pytest.mark.parametrize("seconds", harness.DURATIONS)
def test_http(seconds: float, caplog: pytest.LogCaptureFixture) -> None:
    target = Target()
    caplog.set_level(logging.ERROR)
    try:

        def run(data: bytes) -> None:
            if data.count(b"/large") > 16:
                return  # hundreds of megabytes that the checks here would have to read
            caplog.clear()
            target.run(data)
            assert not caplog.records, caplog.text

        harness.fuzz("http", run, SEEDS, seconds=seconds, quick=2500, mutate=mutate, limit_s=2.0)
    finally:
        target.close()
