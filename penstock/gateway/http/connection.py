"""One client's connection: bytes are parsed into requests, which are answered one after the other.

Invariants: one request is answered at a time and few more are queued, so the memory of a connection is bounded. A head
that is malformed or larger than `head_limit` is answered with an error and ends the connection. The unread rest of a
body is discarded for a moment before the connection closes, so that the client sees the reply. An exception that the
application does not catch goes to the listener's `Failure`, which may still reply; without a reply the connection ends.
Finished requests are not part of reference cycles, so their memory is freed without a garbage collection.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import chain
from typing import Any, cast

import httptools

from penstock.gateway.http.request import Message, Request, Scope

Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Failure = Callable[[Exception, Scope, Receive, Send | None], Awaitable[None]]
"""Called with an exception that the application did not catch. The last argument sends a reply; it is None when a reply
has begun already."""
log = logging.getLogger("penstock.http")

MOST_WAITING = 64
"""Pipelined requests that may wait for the replies to earlier ones."""
BODY_AHEAD = 256 * 1024
"""Bytes of a body that are buffered before the application reads them."""
UNSENT = 64 * 1024
"""Bytes of a reply that are buffered for the client before sending blocks."""
LINGER_S = 2.0
"""How long the unread rest of a body is discarded before the connection closes."""


class Connections:
    """The state that the connections of one listener share."""

    def __init__(self, app: Application, failed: Failure, *, head_limit: int, receive_s: float, room: int) -> None:
        """`room`: the most connections; further ones are answered with 503."""
        self.app = app
        self.failed = failed
        self.head_limit = head_limit
        self.receive_s = receive_s
        self.room = room
        self.loop = asyncio.get_running_loop()
        self.open: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.closing = False

    def sweep(self) -> None:
        """Close connections whose deadline has passed."""
        now = self.loop.time()
        for connection in [one for one in self.open if one.due is not None and one.due <= now]:
            connection.expire()


class Connection(asyncio.Protocol):
    """Receives the callbacks of the transport and of the parser (`on_…`)."""

    def __init__(self, shared: Connections) -> None:
        self._shared = shared
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._scheme: dict[str, Any] = {}
        self._coming: Request | None = None
        """The request whose head or body is arriving."""
        self._answering: Request | None = None
        self._waiting: deque[Request] = deque()
        self._head_size = 0
        self._in_head = True
        self._refusal = b""
        self._reading = True
        self._last = False
        """Whether no further request on this connection is read."""
        self.paused: asyncio.Future[None] | None = None
        self.due: float | None = None
        """The deadline of the client, by the clock of the event loop; None while there is none."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        shared = self._shared
        self._transport = transport = cast(asyncio.Transport, transport)
        if shared.closing or len(shared.open) >= shared.room:
            self._refuse(b"503 Service Unavailable\r\nretry-after: 1")
            return
        transport.set_write_buffer_limits(high=UNSENT)
        shared.open.add(self)
        self.due = shared.loop.time() + shared.receive_s
        client, server = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        self._scheme = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "scheme": "http",
            "root_path": "",
            "client": client[:2] if isinstance(client, tuple) else None,
            "server": server[:2] if isinstance(server, tuple) else None,
        }

    def connection_lost(self, error: Exception | None) -> None:
        self._shared.open.discard(self)
        self.due = None
        self._last = True
        for request in (self._answering, self._coming):
            if request is not None:
                request.disconnect()
        self._coming = self._parser = None  # the parser refers to its connection
        self._waiting.clear()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        if self._last or parser is None:
            return
        if self._in_head:
            self._head_size += len(data)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._last = True  # upgrades are not supported: this request is answered, then the connection ends
            if self._answering is not None:
                self._answering.keep_alive = False
        except httptools.HttpParserError:
            self._refusal = self._refusal or b"400 Bad Request"
        if self._in_head and self._head_size > self._shared.head_limit:
            self._refusal = self._refusal or b"431 Request Header Fields Too Large"
        if self._refusal:
            self._refuse(self._refusal)

    def on_message_begin(self) -> None:
        loop = self._shared.loop
        self._coming = Request(self, loop)
        self._in_head = True
        if self._answering is None and not self._last:
            self.due = loop.time() + self._shared.receive_s

    def on_url(self, url: bytes) -> None:
        assert self._coming is not None
        self._coming.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._coming is not None
        if self._in_head:  # trailers of a chunked body are ignored
            self._coming.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        request, parser = self._coming, self._parser
        assert request is not None and parser is not None
        self._in_head = False
        headers = request.headers
        size = len(request.target) + sum(map(len, chain.from_iterable(headers))) + 4 * len(headers)
        self._head_size = 0
        if size > self._shared.head_limit:
            self._refusal = b"431 Request Header Fields Too Large"
        if self._refusal or self._last:
            return
        if not request.target.startswith(b"/"):
            request.target = _origin_form(request.target)
        request.method, request.version = parser.get_method().decode("latin-1"), parser.get_http_version()
        request.keep_alive = parser.should_keep_alive()
        if self._answering is None:
            self._answer(request)
        elif len(self._waiting) < MOST_WAITING:
            self._waiting.append(request)
            self._pause_reading()
        else:
            self._last = True

    def on_body(self, part: bytes) -> None:
        request = self._coming
        if request is not None and not request.done:
            request.feed(part)
            if request.buffered > BODY_AHEAD:
                self._pause_reading()

    def on_message_complete(self) -> None:
        request, self._coming = self._coming, None
        self._in_head = True
        if request is not None:
            request.end()

    def _answer(self, request: Request) -> None:
        self._answering = request
        self.due = None
        task = self._shared.loop.create_task(self._run(request))
        self._shared.tasks.add(task)
        task.add_done_callback(self._shared.tasks.discard)

    async def _run(self, request: Request) -> None:
        scope = request.scope(self._scheme)
        try:
            await self._shared.app(scope, request.receive, request.send)
        except Exception as error:
            if not (request.disconnected and isinstance(error, ConnectionResetError)):
                await self._failed(request, scope, error)
        finally:
            if request.disconnected:
                self._answering = None
            elif not request.done:
                self._give_up(request)

    async def _failed(self, request: Request, scope: Scope, error: Exception) -> None:
        silent = request.started or request.disconnected
        try:
            await self._shared.failed(error, scope, request.receive, None if silent else request.send)
        except Exception:
            log.exception("the failure handler failed")

    def _give_up(self, request: Request) -> None:
        """The application ended without a complete reply; an incomplete one must not look complete."""
        if request.started:
            self._transport.abort()
        else:
            self._answering = None
            self._refuse(b"500 Internal Server Error")

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def read_on(self) -> None:
        if not self._reading and not self._waiting and not self._last:
            self._reading = True
            self._transport.resume_reading()

    def answered(self, request: Request, *, keep: bool) -> None:
        self._answering = None
        if not request.complete:
            self._linger()
        elif not keep:
            self._last = True
            self._transport.close()
        elif self._waiting:
            self._answer(self._waiting.popleft())
            self.read_on()
        elif self._last or self._shared.closing:
            self._last = True
            self._transport.close()
        else:
            self.due = self._shared.loop.time() + self._shared.receive_s
            self.read_on()  # reading may have been paused by a large body

    def close_when_idle(self) -> None:
        if self._answering is None:
            self._transport.close()

    def expire(self) -> None:
        """The deadline has passed."""
        self.due = None
        if self._coming is not None and not self._last:
            self._refuse(b"408 Request Timeout")
        else:
            self._transport.abort()

    def abort(self) -> None:
        self._transport.abort()

    def pause_writing(self) -> None:
        if self.paused is None:
            self.paused = self._shared.loop.create_future()

    def resume_writing(self) -> None:
        paused, self.paused = self.paused, None
        if paused is not None and not paused.done():
            paused.set_result(None)

    def _pause_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._transport.pause_reading()

    def _linger(self) -> None:
        """Half-close; discard what the client still sends, for a while."""
        self._last = True
        self.due = self._shared.loop.time() + LINGER_S
        if self._transport.can_write_eof():
            self._transport.write_eof()
        if not self._reading:
            self._reading = True
            self._transport.resume_reading()

    def _refuse(self, status: bytes) -> None:
        """Reply to something that is not a valid request, and close."""
        self._last = True
        answering = self._answering
        if answering is not None:
            if answering.complete:
                return  # only a later request is malformed; the connection ends after this reply
            answering.disconnect()
            if answering.started:
                self._transport.abort()
                return
        self._transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        self._linger()


def _origin_form(target: bytes) -> bytes:
    """The path of a target in absolute form, which clients send to proxies (`http://host/path`)."""
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        return target
    path = url.path or b"/"
    return path if url.query is None else path + b"?" + url.query
