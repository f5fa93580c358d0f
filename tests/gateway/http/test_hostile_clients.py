"""What a client without a key can do to a connection (not read, not end, say two things at once, ask for another
protocol): it costs bounded memory, and nothing is read in two ways."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import uvloop

from penstock.gateway.http.listener import Listener
from penstock.gateway.http.refusal import MOST_HEADERS
from penstock.gateway.http.request import ON_DISCONNECT, Message, Scope
from tests.gateway.conftest import eventually
from tests.gateway.http.test_listener import POST, Receive, Send, reply, say
from tests.ports import free_port

on_both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
Run = Callable[[Coroutine[Any, Any, None]], None]
GET = b"GET %b HTTP/1.1\r\nhost: x\r\n%b\r\n"
LARGE = b"x" * 2**21
HEAD_LIMIT = 8192


class App:
    """Echoes; `/large` replies with megabytes, `/events` slowly with a stream, `/never` not at all."""

    def __init__(self) -> None:
        self.seen: list[Scope] = []
        self.left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.seen.append(scope)
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
            body, more = body + message["body"], message["more_body"]
        scope[ON_DISCONNECT](self.left.set)
        match scope["path"]:
            case "/large":
                await reply(send, LARGE)
            case "/medium":
                await reply(send, LARGE[:60_000])
            case "/events":
                await send(start((b"content-type", b"text/event-stream")))
                for number in range(4):
                    await asyncio.sleep(0.05)
                    await send({"type": "http.response.body", "body": b"data: %d\n\n" % number, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            case "/open":  # a stream that has begun and then waits
                await send(start((b"content-type", b"text/event-stream")))
                await send({"type": "http.response.body", "body": b"data: 0\n\n", "more_body": True})
                await self.left.wait()
            case "/never":
                await self.left.wait()
            case _:
                await reply(send, body or scope["method"].encode())

    async def failed(self, error: Exception, scope: Scope, receive: Receive, send: Send | None) -> None:
        raise error


def start(*headers: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": list(headers)}


@asynccontextmanager
async def listening(stalled_reader_s: float = 60.0, **settings: Any) -> AsyncIterator[tuple[App, int, Listener]]:
    app, port = App(), free_port()
    settings = {"head_limit": HEAD_LIMIT, "receive_s": 60.0, "room": 100, **settings}
    listener = Listener(app, app.failed, "127.0.0.1", port, stalled_reader_s=stalled_reader_s, **settings)
    await listener.start()
    try:
        yield app, port, listener
    finally:
        await listener.close(0.1)


class MovedClock:
    """The loop of a listener, whose clock the test moves on."""

    def __init__(self, listener: Listener) -> None:
        self._shared, self._loop, self._ahead = listener._shared, listener._shared.loop, 0.0
        listener._shared.loop = cast(asyncio.AbstractEventLoop, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def time(self) -> float:
        return self._loop.time() + self._ahead

    def move(self, seconds: float) -> None:
        self._ahead += seconds
        self._shared.sweep()


def held(listener: Listener) -> int:
    """Bytes of replies in the buffers of transports, and how many large replies connections hold."""
    return sum(connection._transport.get_write_buffer_size() for connection in listener._shared.open)


async def deaf(port: int, sent: bytes) -> asyncio.StreamWriter:
    """A client that never reads and whose system buffers little."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    _, writer = await asyncio.open_connection(sock=sock)
    writer.transport.pause_reading()
    writer.write(sent)
    return writer


@on_both_loops
def test_pipelined_requests_wait_until_the_last_reply_has_left_and_a_deaf_client_is_cut(run: Run) -> None:
    async def scenario() -> None:
        async with listening(stalled_reader_s=0.4) as (app, port, listener):
            begun = time.monotonic()
            writer = await deaf(port, (GET % (b"/large", b"")) * 60)
            await eventually(lambda: bool(app.seen))
            most = seen = 0
            while listener._shared.open:
                most, seen = max(most, held(listener)), len(app.seen)
                assert time.monotonic() - begun < 120, "it must be cut"
                await asyncio.sleep(0.02)
            assert most < 2**20, "one piece of a reply is in the buffer"
            assert seen < 10, "only as many as the system's buffers took"
            writer.close()

    run(scenario())


@on_both_loops
def test_a_deaf_client_that_asked_to_close_is_cut_too(run: Run) -> None:
    async def scenario() -> None:
        async with listening() as (app, port, listener):
            clock = MovedClock(listener)
            unread = b"POST /large HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nlate body"
            assert listener._listening is not None
            listener._listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the rest stays with us
            writers = [
                await deaf(port, GET % (b"/medium", b"connection: close\r\n")),
                await deaf(port, GET % (b"/large", b"connection: close\r\n")),
                await deaf(port, b"GET /large HTTP/1.0\r\n\r\n"),
                await deaf(port, unread + b"NONSENSE\r\n\r\n"),
            ]
            await eventually(lambda: len(app.seen) == 4)
            assert listener._shared.open

            def cut() -> bool:
                clock.move(70.0)
                return not listener._shared.open

            await eventually(cut)
            for writer in writers:
                writer.close()

    run(scenario())


@on_both_loops
def test_a_slow_reader_gets_all_of_a_large_reply_and_then_the_next(run: Run) -> None:
    async def scenario() -> None:
        async with listening() as (app, port, listener):
            clock = MovedClock(listener)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET % (b"/large", b"") * 2 + GET % (b"/end", b"connection: close\r\n"))
            got = 0
            while part := await reader.read(2**18):
                got += len(part)
                clock.move(10.0)  # in all longer than a deaf client may stay
                await asyncio.sleep(0.001)
            assert got > 2 * len(LARGE) and part == b"" and len(app.seen) == 3
            writer.close()

    run(scenario())


CHUNKED = POST + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"


async def test_trailers_and_the_framing_of_chunks_are_limited_like_heads() -> None:
    async with listening() as (_, port, _):
        for name, status, parts in (
            ("few trailers", b"200", [b"1\r\na\r\n0\r\n", b"x-a: b\r\n" * 9, b"\r\n"]),
            ("too many trailers", b"431", [b"1\r\na\r\n0\r\n", b"a:\r\n" * (MOST_HEADERS + 1), b"\r\n"]),
            ("large trailers", b"431", [b"0\r\n", *[b"x-a: " + b"b" * 2000 + b"\r\n"] * 6]),
            ("a trailer without an end", b"431", [b"0\r\nx-a: ", *[b"b" * 2000] * 6]),
            ("a long extension", b"431", [b"1;", *[b"a" * 2000] * 6]),
            ("a long size", b"431", [b"0" * 2000] * 6),
            ("tiny chunks", b"400", [b"1\r\na\r\n" * 1000] * 30),
            ("extensions", b"400", [(b"1;" + b"x" * 1000 + b"\r\na\r\n") * 4] * 9),
            ("small chunks", b"200", [*[b"10\r\n" + b"a" * 16 + b"\r\n"] * 100, b"0\r\n\r\n"]),
        ):
            answer = await say(port, CHUNKED, *parts)
            assert answer.startswith(b"HTTP/1.1 " + status) and answer.count(b"HTTP/1.1") == 1, (name, answer[:200])
        many = b"".join(b"x-%d: 1\r\n" % number for number in range(MOST_HEADERS))
        assert (await say(port, GET % (b"/", many))).startswith(b"HTTP/1.1 431")


async def test_what_follows_a_refusal_is_discarded_within_a_bound() -> None:
    async with listening() as (_, port, _):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = 0
        with pytest.raises(ConnectionError):
            writer.write(CHUNKED + b"0\r\nx-a: ")
            while sent < 256 << 20:
                writer.write(b"b" * (1 << 18))
                sent += 1 << 18
                await writer.drain()
        writer.transport.abort()
        # What was discarded, and what the sockets' buffers hold; without a bound it is gigabytes in the two seconds.
        assert sent < 64 << 20, sent


# What java.net.http.HttpClient sends by default with a POST.
JAVA = (
    b"POST /echo HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: 16\r\nHost: 127.0.0.1:8000\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\nUpgrade: h2c\r\n"
    b"User-Agent: Java-http-client/21.0.4\r\nContent-Type: application/json\r\n\r\n"
)


@on_both_loops
def test_an_upgrade_is_ignored_and_the_body_arrives(run: Run) -> None:
    async def scenario() -> None:
        async with listening() as (app, port, _):
            end = GET % (b"/end", b"connection: close\r\n")
            body = b'{"model":"tiny"}'
            for parts in (
                [JAVA + body + end],
                [JAVA, body, end],
                [JAVA + body[:5], body[5:] + end],
                [*(JAVA[i : i + 40] for i in range(0, len(JAVA), 40)), body + end],
            ):
                answer = await say(port, *parts)
                first, _, second = answer.partition(body)
                assert first.startswith(b"HTTP/1.1 200") and second.startswith(b"HTTP/1.1 200"), parts
                assert second.endswith(b"GET") and b"upgrade" not in answer.lower()
            assert dict(app.seen[0]["headers"])[b"user-agent"].startswith(b"Java")
            chunked = JAVA.replace(b"Content-Length: 16", b"Transfer-Encoding: chunked")
            pieces = b"6\r\n" + body[:6] + b"\r\na\r\n" + body[6:] + b"\r\n0\r\n\r\n"
            assert body in await say(port, chunked + pieces + end)
            assert (await say(port, JAVA + body + JAVA + body + end)).count(body) == 2
            for offer in (b"websocket", b"TLS/1.0", b"h2c"):
                get = GET % (b"/", b"upgrade: %b\r\nconnection: upgrade\r\n" % offer)
                answer = await say(port, get, end)
                assert answer.count(b"HTTP/1.1 200") == 2 and answer.count(b"GET") == 2, offer
            assert (await say(port, b"CONNECT a:443 HTTP/1.1\r\nhost: a:443\r\n\r\n")).startswith(b"HTTP/1.1 501")

    run(scenario())


async def half_closing(port: int, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    writer.write_eof()
    try:
        return await asyncio.wait_for(reader.read(), 120)
    finally:
        writer.close()


@on_both_loops
def test_a_client_that_has_shut_down_its_sending_side_gets_its_whole_reply(run: Run) -> None:
    async def scenario() -> None:
        async with listening() as (app, port, listener):
            events = await half_closing(port, b"POST /events HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi")
            last = events.rpartition(b"HTTP/1.1 ")[2]
            assert last.startswith(b"200") and last.endswith(b"0\r\n\r\n")
            assert [number for number in range(4) if b"data: %d\n\n" % number in last] == [0, 1, 2, 3]
            assert events.count(b"HTTP/1.1 100 Continue\r\n\r\n") <= 1 and events.count(b"HTTP/1.1 ") <= 2
            several = await half_closing(port, (GET % (b"/large", b"")) * 3)
            assert several.count(b"HTTP/1.1 200") == 3 and several.count(LARGE) == 3
            await eventually(lambda: not listener._shared.open)
            cut = await half_closing(port, POST + b"content-length: 5\r\n\r\nab")
            assert b"200" not in cut and app.left.is_set(), "its request is not complete"

    run(scenario())


@on_both_loops
@pytest.mark.parametrize("path", [b"/never", b"/open"])
def test_a_client_that_is_gone_is_told_from_one_that_only_sends_no_more(run: Run, path: bytes) -> None:
    async def scenario() -> None:
        async with listening(receive_s=0.4) as (app, port, listener):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET % (path, b""))
            if path == b"/open":
                await reader.readuntil(b"data: 0\n\n\r\n")
            await eventually(lambda: bool(app.seen))
            writer.write_eof()
            await asyncio.sleep(0.3)
            assert not app.left.is_set(), "it may still read"
            writer.close()
            await eventually(lambda: app.left.is_set() and not listener._shared.open)

    run(scenario())


async def test_heads_that_proxies_could_read_in_two_ways_are_refused() -> None:
    async with listening() as (app, port, _):
        for status, wrong in (
            (b"400", b"GET / HTTP/1.1\r\n\r\n"),
            (b"400", b"GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n"),
            (b"400", b"GET / HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n"),
            (b"400", b"GET / HTTP/1.1\r\nhost: a/b\r\n\r\n"),
            (b"400", b"GET / HTTP/1.1\r\nhost: a b\r\n\r\n"),
            (b"505", b"GET / HTTP/0.9\r\nhost: a\r\n\r\n"),
            (b"505", b"GET /\r\n\r\n"),
            (b"505", b"GET / HTTP/2.0\r\nhost: a\r\n\r\n"),
            (b"505", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
            (b"400", b"GET / HTTP/1.1\nhost: a\n\n"),
            (b"400", b"GET / HTTP/1.1\r\nhost : a\r\n\r\n"),
            (b"400", b"GET / HTTP/1.1\r\nhost: a\r\nx-a: b\r\n folded\r\n\r\n"),
            (b"400", b"GET / HTTP/1.1\r\nhost: a\r\nx-a: b\rc\r\n\r\n"),
            (b"400", POST + b"content-length: 1\r\ncontent-length: 1\r\n\r\na"),
            (b"400", POST + b"content-length: 1, 1\r\n\r\na"),
            (b"400", POST + b"content-length: +1\r\n\r\na"),
            (b"400", POST + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"),
            (b"501", POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
            (b"400", POST + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n"),
            (b"501", POST + b"transfer-encoding: identity\r\n\r\nab"),
            (b"501", POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n"),
            (b"400", b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"),
            (b"417", POST + b"expect: 200-ok\r\ncontent-length: 1\r\n\r\na"),
            (b"400", b"GET ftp://a/ HTTP/1.1\r\nhost: a\r\n\r\n"),
            (b"400", b"GET http://user@a/ HTTP/1.1\r\nhost: a\r\n\r\n"),
            (b"400", b"GET * HTTP/1.1\r\nhost: a\r\n\r\n"),
            (b"400", b"GET a HTTP/1.1\r\nhost: a\r\n\r\n"),
        ):
            answer = await say(port, wrong)
            assert answer.startswith(b"HTTP/1.1 " + status) and answer.count(b"HTTP/1.1") == 1, (wrong, answer)
        assert not app.seen
        for right in (
            b"GET / HTTP/1.0\r\n\r\n",
            b"GET / HTTP/1.1\r\nhost:\r\nconnection: close\r\n\r\n",
            b"GET / HTTP/1.1\r\nhost: [::1]:8000\r\nconnection: close\r\n\r\n",
            b"OPTIONS * HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
            b"POST / HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\na",
        ):
            answer = await say(port, right)
            assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1, (right, answer)
        absolute = b"GET http://[::2]:81/p HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
        assert (await say(port, absolute)).startswith(b"HTTP/1.1 200")
        assert app.seen[-1]["headers"][0] == (b"host", b"[::2]:81") and app.seen[-1]["path"] == "/p"


async def test_one_address_cannot_take_all_connections() -> None:
    async with listening(room_per_address=2) as (_, port, listener):
        taken = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await eventually(lambda: len(listener._shared.open) == 2)
        assert (await say(port)).startswith(b"HTTP/1.1 503")
        for _, writer in taken:
            writer.close()
        await eventually(lambda: not listener._shared.open)
        assert not listener._shared.of_address
        assert (await say(port, GET % (b"/", b"connection: close\r\n"))).endswith(b"GET")
