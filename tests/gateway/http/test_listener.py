"""HTTP/1.1 on the wire: what a connection may send, in which pieces, and what comes back byte by byte."""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest
import uvloop

from penstock.gateway.http.connection import BODY_AHEAD, MOST_WAITING
from penstock.gateway.http.listener import Listener
from penstock.gateway.http.request import ON_DISCONNECT, Message, Scope
from tests.gateway.conftest import garbage, until
from tests.ports import free_port

Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
POST = b"POST /echo HTTP/1.1\r\nhost: x\r\n"


on_both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
Run = Callable[[Coroutine[Any, Any, None]], None]


class Echo:
    """Says what it was sent; `/stream` in parts, `/late` after a while, `/wait` never, `/crash` fails, `/half` fails in
    the middle, `/after` at the end; `/worse` fails in what tells of failures too."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.failures: list[tuple[str, bool]] = []
        self.seen: list[Scope] = []
        self.written = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.seen.append(scope)
        path = scope["path"]
        if path in ("/crash", "/worse"):
            raise ValueError("the application failed")
        if path == "/early":
            await reply(send, b"no need", [(b"connection", b"close")])
            return
        if path == "/late":
            await asyncio.sleep(0.1)
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
            body += message["body"]
            if not message["more_body"]:
                break
        if path == "/wait":
            scope[ON_DISCONNECT](self.left.set)
            await self.left.wait()
            return
        if path in ("/stream", "/half", "/flood"):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for part in (b"one ", b"", b"two "):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            if path == "/half":
                raise ValueError("in the middle")
            while path == "/flood":
                self.written += 1
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await send({"type": "http.response.body", "body": b"three", "more_body": False})
            return
        await reply(send, body or scope["method"].encode())
        if path == "/after":
            raise ValueError("when everything was said")

    async def failed(self, error: Exception, scope: Scope, receive: Receive, send: Send | None) -> None:
        self.failures.append((str(error), send is not None))
        if scope["path"] == "/worse":
            raise ValueError("once more")
        if send is not None:
            await reply(send, b"our fault", status=500)


async def reply(send: Send, body: bytes, headers: list[tuple[bytes, bytes]] | None = None, status: int = 200) -> None:
    sized = [(b"content-length", str(len(body)).encode()), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": sized})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def listening(room: int = 100, receive_s: float = 60.0) -> AsyncIterator[tuple[Echo, int]]:
    app, port = Echo(), free_port()
    listener = Listener(
        app, app.failed, "127.0.0.1", port, head_limit=4096, receive_s=receive_s, room=room, stalled_reader_s=60.0
    )
    await listener.start()
    try:
        yield app, port
    finally:
        await listener.close(0.2)


async def say(port: int, *parts: bytes) -> bytes:
    """Everything that comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.01)
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()


@on_both_loops
def test_requests_arrive_whole_however_they_are_cut(run: Run) -> None:
    run(requests_in_pieces())


async def requests_in_pieces() -> None:
    async with listening() as (app, port):
        chunks = b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nx-late: 1\r\n\r\n"
        chunked = POST + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n" + chunks
        for size in (1, 7, len(chunked)):
            answer = await say(port, *(chunked[i : i + size] for i in range(0, len(chunked), size)))
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and answer.endswith(b"\r\n\r\nabcde")
        assert b"x-late" not in dict(app.seen[-1]["headers"]), "what follows a body is no header"
        target = b"GET http://other/a%20b/c?q=1%202 HTTP/1.1\r\nHost: x\r\nX-Name: v\r\nconnection: close\r\n\r\n"
        assert (await say(port, target)).endswith(b"GET")
        scope = app.seen[-1]
        assert (scope["path"], scope["query_string"]) == ("/a b/c", b"q=1%202")
        assert (b"x-name", b"v") in scope["headers"] and (b"host", b"other") in scope["headers"]


async def test_a_connection_answers_requests_in_order_also_when_they_come_at_once() -> None:
    async with listening() as (app, port):
        both = b"".join(POST + b"content-length: 1\r\n\r\n%d" % number for number in range(4))
        answer = await say(port, both + b"GET /end HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        bodies = [part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200 OK\r\n")[1:]]
        assert bodies == [b"0", b"1", b"2", b"3", b"GET"] and len(app.seen) == 5
        flood = await say(port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 5000)
        assert flood.count(b" 200 OK") <= MOST_WAITING + 1, "nobody makes it hold thousands"


async def test_streams_are_chunked_and_older_clients_get_them_until_the_end() -> None:
    async with listening() as (_, port):
        new = await say(port, b"GET /stream HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert b"transfer-encoding: chunked" in new
        assert new.endswith(b"4\r\none \r\n4\r\ntwo \r\n5\r\nthree\r\n0\r\n\r\n")
        old = await say(port, b"GET /stream HTTP/1.0\r\n\r\n")
        assert b"chunked" not in old and old.endswith(b"\r\n\r\none two three")
        assert b"connection: keep-alive" in await say(
            port, b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\nGET / HTTP/1.0\r\n\r\n"
        )
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/stream")).text == "one two three"
            head = await client.head("/")
            assert head.headers["content-length"] == "4" and not head.content


async def test_what_is_no_request_is_answered_and_ends_the_connection() -> None:
    async with listening() as (app, port):
        for wrong in (
            b"NONSENSE\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            POST + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab",
            POST + b"transfer-encoding: chunked\r\n\r\nnot a size\r\n",
        ):
            answer = await say(port, wrong)
            assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1, wrong
        assert (await say(port, b"GET /" + b"a" * 5000)).startswith(b"HTTP/1.1 431"), "without an end"
        assert not [scope for scope in app.seen if scope["method"] == "GET"]
        good = await say(port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\nNONSENSE\r\n\r\n")
        assert good.startswith(b"HTTP/1.1 200") and good.count(b"HTTP/1.1") == 1, "what came before it is answered"


@on_both_loops
def test_what_escapes_the_application_has_an_owner_and_half_an_answer_never_looks_whole(run: Run) -> None:
    nobody_asked: list[dict[str, Any]] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: nobody_asked.append(context))
        async with listening() as (app, port):
            ends = b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            both = await say(port, b"GET /crash HTTP/1.1\r\nhost: x\r\n\r\nGET /next" + ends)
            assert both.startswith(b"HTTP/1.1 500") and b"our fault" in both and both.endswith(b"GET"), "it goes on"
            assert app.failures == [("the application failed", True)]
            worse = await say(port, b"GET /worse" + ends)
            assert worse.startswith(b"HTTP/1.1 500") and b"server_error" in worse and b"once more" not in worse
            with suppress(ConnectionResetError):
                assert not (await say(port, b"GET /half HTTP/1.1\r\nhost: x\r\n\r\n")).endswith(b"0\r\n\r\n")
            assert app.failures[-1] == ("in the middle", False), "there is no second answer"
            after = await say(port, b"GET /after HTTP/1.1\r\nhost: x\r\n\r\nGET /next" + ends)
            assert after.count(b"HTTP/1.1 200") == 2 and app.failures[-1] == ("when everything was said", False)

    run(scenario())
    gc.collect()
    assert not nobody_asked


@on_both_loops
def test_what_is_over_leaves_nothing_for_the_garbage_collector(run: Run) -> None:
    """A collection stops everybody; with ten objects per request there was one of a tenth of a second every 6000."""

    async def scenario() -> None:
        async with listening() as (app, port):
            close = b"GET /stream HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            with garbage() as found:
                for _ in range(3):
                    await say(
                        port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 3 + POST + b"content-length: 2\r\n\r\nhi" + close
                    )
                    await say(port, b"GET /crash HTTP/1.1\r\nhost: x\r\n\r\n" + close)
                    await say(port, b"NONSENSE\r\n\r\n")
                app.seen.clear()
                await asyncio.sleep(0.05)
            assert not found, found

    run(scenario())


async def test_who_asks_before_sending_a_body_is_told_to_go_on_and_an_early_answer_arrives() -> None:
    async with listening() as (_, port):
        asks = POST + b"content-length: 2\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n"
        answer = await say(port, asks, b"hi")
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK") and answer.endswith(b"hi")
        early = b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n"
        assert (await say(port, early, b"x" * 30_000, b"x" * 30_000)).endswith(b"no need")


@on_both_loops
def test_after_a_large_body_that_nobody_took_in_time_the_connection_goes_on(run: Run) -> None:
    async def scenario() -> None:
        async with listening() as (_, port):
            for size in (BODY_AHEAD // 2, BODY_AHEAD + 1, 2 * BODY_AHEAD - 1000, 3 * BODY_AHEAD):
                body = b"x" * size
                large = b"POST /late HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size + body
                answer = await say(port, large, b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                assert answer.count(b"HTTP/1.1 200 OK") == 2 and body in answer, size

    run(scenario())


@on_both_loops
def test_a_client_that_leaves_is_noticed_while_it_is_waited_for(run: Run) -> None:
    run(client_that_leaves())


async def client_that_leaves() -> None:
    async with listening() as (app, port):
        for head in (
            b"POST /wait HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",
            POST + b"content-length: 5\r\n\r\nab",
        ):
            app.left.clear()
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head)
            await asyncio.sleep(0.05)
            assert not app.left.is_set()
            writer.close()
            await asyncio.wait_for(app.left.wait(), 60)


@on_both_loops
def test_who_does_not_read_makes_only_its_own_answer_wait(run: Run) -> None:
    run(client_that_does_not_read())


async def client_that_does_not_read() -> None:
    async with listening() as (app, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.transport.pause_reading()
        writer.write(b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n")
        before = -1
        while app.written != before or not before:
            before = app.written
            await asyncio.sleep(0.1)
        assert app.written < 500
        assert (await say(port, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")).endswith(b"GET")
        writer.close()


@on_both_loops
def test_a_crowd_of_new_clients_does_not_queue_behind_turns_of_the_loop(run: Run) -> None:
    async def scenario() -> None:
        app, port = Echo(), free_port()
        listener = Listener(
            app, app.failed, "127.0.0.1", port, head_limit=4096, receive_s=60.0, room=100, stalled_reader_s=60.0
        )
        await listener.start()
        crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]  # nobody accepts meanwhile
        for client in crowd:
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        turns = before = 0
        while len(app.seen) < 40:  # the system may be late with some; turns without any of them do not count
            await asyncio.sleep(0)
            turns += len(app.seen) > before
            before = len(app.seen)
        assert turns <= 10
        await asyncio.sleep(0.01)
        for client in crowd:
            client.settimeout(60)
            answer = client.recv(1000)
            while not answer.endswith(b"GET"):
                answer += client.recv(1000)
            client.close()
        await listener.close(0.2)

    run(scenario())


@on_both_loops
def test_clients_wait_while_the_system_has_no_room_and_are_served_when_it_has(run: Run) -> None:
    class Full(socket.socket):
        refusals = 0

        def accept(self) -> Any:
            if Full.refusals < 2:
                Full.refusals += 1
                raise OSError(errno.EMFILE, "too many open files")
            return super().accept()

    async def scenario() -> None:
        app, port = Echo(), free_port()
        listener = Listener(
            app, app.failed, "127.0.0.1", port, head_limit=4096, receive_s=60.0, room=100, stalled_reader_s=60.0
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("penstock.gateway.http.listener.socket.socket", Full)
            await listener.start()
        answer = await say(port, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert answer.endswith(b"GET") and Full.refusals == 2
        await listener.close(0.2)

    run(scenario())


async def test_more_connections_than_there_is_room_for_are_told_to_come_back() -> None:
    async with listening(room=2) as (_, port):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await asyncio.sleep(0.05)
        answer = await say(port)
        assert answer.startswith(b"HTTP/1.1 503") and b"retry-after" in answer
        for _, writer in held:
            writer.close()
        request = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        await until(lambda: say(port, request), lambda answer: answer.endswith(b"GET"))


async def test_a_connection_that_sends_nothing_is_closed_and_a_busy_one_is_not() -> None:
    async with listening(receive_s=0.2) as (app, port):
        assert await say(port) == b""
        # A busy machine may be too late with the first bytes: then it was a connection that sent nothing.
        begun = b"GET / HTTP/1.1\r\nhost: x\r\nx-a"
        await until(lambda: say(port, begun), lambda answer: answer.startswith(b"HTTP/1.1 408"))
        while not app.seen:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /wait HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
            while not app.seen and not reader.at_eof():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.6)
        assert not app.left.is_set() and not reader.at_eof(), "an answer may take as long as it needs"
        writer.close()
