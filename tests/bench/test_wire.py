"""The load generator's own HTTP client, against a real socket."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from penstock.bench.wire import Connection, StatusError, Target, WireError
from penstock.errors import ConfigError

Respond = Callable[[asyncio.StreamWriter, int], Awaitable[None]]
EVENTS = [b'{"n": 1}', '{"text": "é→"}'.encode(), b"[DONE]"]
BODY = b": keep-alive\n\n" + b"".join(b"data: " + event + b"\n\n" for event in EVENTS)


@asynccontextmanager
async def server(respond: Respond) -> AsyncIterator[Target]:
    """Answers the n-th request of each connection with `respond(writer, n)`."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        count = 0
        while not reader.at_eof():
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            await respond(writer, count)
            count += 1
        writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        yield Target.parse(f"http://127.0.0.1:{port}/v1")


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    framed = b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_events_survive_every_chunking_and_the_connection_is_kept(size: int) -> None:
    served: list[int] = []

    async def respond(writer: asyncio.StreamWriter, count: int) -> None:
        served.append(count)
        writer.write(chunked(BODY, size))
        await writer.drain()

    async with server(respond) as target:
        connection = Connection(target)
        for _ in range(2):
            assert [event async for event in connection.events("/v1/completions", b"{}")] == EVENTS
        await connection.close()
    assert served == [0, 1]


async def test_trailers_and_extensions_of_chunks_are_passed_over() -> None:
    async def respond(writer: asyncio.StreamWriter, count: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x;x=1\r\n" % len(BODY) + BODY)
        await writer.drain()
        for part in (b"\r", b"\n0\r\n", b"Sum: 1\r", b"\n\r\n"):
            await asyncio.sleep(0.01)
            writer.write(part)
            await writer.drain()

    async with server(respond) as target:
        connection = Connection(target)
        for _ in range(2):
            assert [event async for event in connection.events("/v1/completions", b"{}")] == EVENTS
        await connection.close()


async def test_an_error_status_is_raised_with_its_body() -> None:
    async def respond(writer: asyncio.StreamWriter, count: int) -> None:
        body = b'{"error": {}}'
        writer.write(b"HTTP/1.1 503 x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()

    async with server(respond) as target:
        connection = Connection(target)
        with pytest.raises(StatusError) as caught:
            await connection.request("GET", "/v1/models")
        assert (caught.value.status, caught.value.body) == (503, b'{"error": {}}')
        await connection.close()


async def test_a_reply_cut_short_is_an_error_and_the_next_request_reconnects() -> None:
    replies = [chunked(BODY, 8)[:60], chunked(BODY, 8)]

    async def respond(writer: asyncio.StreamWriter, count: int) -> None:
        reply = replies.pop(0)
        writer.write(reply)
        await writer.drain()
        if not reply.endswith(b"0\r\n\r\n"):
            writer.close()

    async with server(respond) as target:
        connection = Connection(target)
        with pytest.raises(WireError, match="failed"):
            _ = [event async for event in connection.events("/x", b"")]
        assert [event async for event in connection.events("/x", b"")] == EVENTS
        await connection.close()


async def test_nobody_listening_is_a_readable_error() -> None:
    listener = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    listener.close()
    await listener.wait_closed()
    with pytest.raises(WireError, match=f"no connection to 127.0.0.1:{port}"):
        await Connection(Target.parse(f"http://127.0.0.1:{port}")).request("GET", "/v1/models")


def test_urls() -> None:
    assert Target.parse("https://example.com/base/v1/").prefix == "/base"
    assert Target.parse("https://example.com").port == 443
    assert b"Authorization: Bearer k" in Target.parse("http://h", "k").head("GET", "/", 0)
    assert Target.parse("localhost:8000").port == 8000
    with pytest.raises(ConfigError, match="should look like"):
        Target.parse("ftp://localhost:8000")
