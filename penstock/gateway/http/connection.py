"""One client's connection: bytes are parsed into requests, which are answered one after the other.

Invariants: what a connection holds is bounded. One request is answered at a time, the next one begins when the last
reply has left our buffers, few more are queued, and of a large reply only a piece is in the transport's buffer. A head
that is malformed or larger than `head_limit` is answered with an error and ends the connection; trailers and the
framing of a chunked body have the same limit. Every wait for the client has a deadline: for its requests (`due`) and
for reading our replies (`write_due`). The unread rest of a body is discarded for a moment before the connection closes,
so that the client sees the reply. A client that has shut down its sending side still gets its reply. An exception that
the application does not catch goes to the listener's `Failure`, which may still reply; without a reply the connection
ends. Finished requests are not part of reference cycles, so their memory is freed without a garbage collection.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from typing import Any, cast

import httptools

from penstock.gateway.http.connections import Connections
from penstock.gateway.http.head import framing, refusal
from penstock.gateway.http.refusal import (
    FAILED,
    FRAMING,
    MOST_HEADERS,
    SMALL_CHUNKS,
    TLS,
    TOO_LARGE,
    TOO_MANY,
    TOO_SLOW,
    VERSION,
    Refusal,
    malformed,
)
from penstock.gateway.http.request import Request, Scope
from penstock.gateway.http.request_id import request_id

log = logging.getLogger("penstock.http")

MOST_WAITING = 64
"""Pipelined requests that may wait for the replies to earlier ones."""
BODY_AHEAD = 256 * 1024
"""Bytes of a body that are buffered before the application reads them."""
UNSENT = 64 * 1024
"""Bytes of a reply that are buffered for the client before sending blocks."""
PIECE = 128 * 1024
"""A reply that is larger is given to the transport in pieces of this size."""
LINGER_S = 2.0
"""How long the unread rest of a body is discarded before the connection closes."""
LINGER_BYTES = 4 << 20
"""How much of it at most: reading at full speed for nothing would slow others down."""
NOTICE_S = 1.0
"""The application waits for a reader just as long as the connection and shall notice first, since it counts them."""
LOOK_S = (0.02, 0.2)
"""When to see whether a client that sends no more is gone altogether; after that, the sweeper looks."""
_TCP_CLOSE = 7
"""The state of a socket after a reset, in the first byte of Linux's TCP_INFO."""
_TLS_HANDSHAKE = b"\x16\x03"


class Connection(asyncio.Protocol):
    """Receives the callbacks of the transport and of the parser (`on_…`)."""

    def __init__(self, shared: Connections) -> None:
        self._shared = shared
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._address = ""
        self._scheme: dict[str, Any] = {}
        self._coming: Request | None = None
        """The request whose head or body is arriving."""
        self._answering: Request | None = None
        """The request whose reply is being made or has not left our buffers."""
        self._waiting: deque[Request] = deque()
        self._head_size = 0
        self._in_head = True
        self._head_only = False
        """Whether the request that was read last is a HEAD."""
        self._trailers = 0
        self._since_body = 0
        """Bytes read after the last part of the body: the size of a chunk or the trailers."""
        self._fed = 0
        self._discarded = 0
        self._body_size = 0
        self._repeated_head = False
        self._refusal: Refusal | None = None
        self._reading = True
        self._last = False
        """Whether no further request on this connection is read."""
        self._overdue = False
        self._unsent: deque[memoryview] = deque()
        """What the transport's buffer has no room for yet."""
        self._blocked = False
        """Whether the transport's buffer is full."""
        self._looking: asyncio.TimerHandle | None = None
        self.half_closed = False
        """Whether the client sends no more; it may still read."""
        self.paused: asyncio.Future[None] | None = None
        self.due: float | None = None
        """The deadline of the client for its next step, by the clock of the event loop; None while there is none."""
        self.write_due: float | None = None
        """The deadline of the client for reading what fills our buffer; None while it is not full."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        shared = self._shared
        self._transport = transport = cast(asyncio.Transport, transport)
        client, server = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        self._address = str(client[0]) if isinstance(client, tuple) else ""
        if not shared.admit(self, self._address):
            self._last = True
            transport.write(TOO_MANY.reply(request_id(None)))  # no line in the log: there may be very many
            transport.close()
            return
        transport.set_write_buffer_limits(high=UNSENT)
        self.due = shared.loop.time() + shared.receive_s
        self._scheme = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "scheme": "http",
            "root_path": "",
            "client": client[:2] if isinstance(client, tuple) else None,
            "server": server[:2] if isinstance(server, tuple) else None,
        }

    def connection_lost(self, error: Exception | None) -> None:
        self._shared.forget(self, self._address)
        self.due = None
        self._last = True
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        for request in (self._answering, self._coming):
            if request is not None:
                request.disconnect()
        self._coming = self._parser = None  # the parser refers to its connection
        self._waiting.clear()
        self._unsent.clear()
        if self._answering is not None and self._answering.done:
            self._answering = None
        self.resume_writing()

    def eof_received(self) -> bool:
        """The client sends no more. Whether it is gone altogether shows only when it refuses data: so a request that
        is complete goes on, and the client is sent something that it can ignore."""
        answering = self._answering
        if answering is None or not (answering.complete or answering.done):
            return False
        if answering.probe() is None:
            return False
        self.half_closed = True
        self._coming = None
        self._probe()
        self._look_again(0)
        return True

    def _probe(self) -> None:
        if self._answering is not None and self.paused is None and (probe := self._answering.probe()):
            self._transport.write(probe)

    def _look_again(self, turn: int) -> None:
        loop = self._shared.loop
        self._looking = loop.call_later(LOOK_S[turn], self._look_twice, turn) if turn < len(LOOK_S) else None

    def _look_twice(self, turn: int) -> None:
        self.look()
        if not self._transport.is_closing():
            self._look_again(turn + 1)

    def look(self) -> None:
        """End a half-closed connection whose client has refused data. The event loop no longer watches it."""
        sock = self._transport.get_extra_info("socket")
        try:
            gone = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE
        except (OSError, AttributeError):  # a system without this option
            gone = True
        if gone:
            self._transport.abort()

    def look_closely(self) -> None:
        """`look`, and make a client that has gone meanwhile refuse something."""
        self.look()
        if not self._transport.is_closing():
            self._probe()

    def data_received(self, data: bytes) -> None:
        if self._last or self._parser is None:
            self._discarded += len(data)
            if self._discarded > LINGER_BYTES:
                self._transport.abort()
            return
        if self._in_head:
            self._head_size += len(data)
        else:
            self._since_body += len(data)
            self._fed += len(data)
        self._feed(data)
        if not self._refusal:
            limit = self._shared.head_limit
            if self._in_head:
                if self._head_size > limit:
                    self._refusal = TOO_LARGE
            elif self._since_body > limit:
                self._refusal = TOO_LARGE
            elif self._fed > limit + 2 * self._body_size:
                self._refusal = SMALL_CHUNKS
        if self._refusal:
            self._refuse(self._refusal)

    def _feed(self, data: bytes) -> None:
        parser = self._parser
        assert parser is not None
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError:
            log.exception("a request could not be read")
            self._refusal = self._refusal or malformed()
        except httptools.HttpParserError as error:
            self._refusal = self._refusal or _unreadable(str(error), data, self._in_head)

    def _ignore_upgrade(self, rest: bytes) -> None:
        """The parser ends a message that asks for an upgrade after its head. Another one reads on as if the head had
        not asked."""
        request = self._coming
        if self._refusal or self._last or request is None:
            return
        self._parser = parser = httptools.HttpRequestParser(self)
        if framed := framing(request):
            self._repeated_head = True
            try:
                parser.feed_data(b"POST / HTTP/1.1\r\n" + framed + b"\r\n")
            except httptools.HttpParserError:  # the first parser did not look at a framing that it would not use
                self._refusal = FRAMING
                return
            finally:
                self._repeated_head = self._in_head = False
                self._coming = request
        else:
            request.upgrades = False
            self.on_message_complete()
        if rest:
            self._feed(rest)

    def on_message_begin(self) -> None:
        loop = self._shared.loop
        self._coming = Request(self, loop)
        self._in_head = True
        self._head_only = False
        if self._answering is None and not self._last:
            self.due = loop.time() + self._shared.receive_s

    def on_url(self, url: bytes) -> None:
        assert self._coming is not None
        self._coming.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._coming is not None
        if self._in_head:
            self._coming.headers.append((name.lower(), value))
        else:  # trailers of a chunked body are ignored
            self._trailers += 1
            if self._trailers > MOST_HEADERS:
                self._refusal = TOO_LARGE

    def on_headers_complete(self) -> None:
        request, parser = self._coming, self._parser
        assert request is not None and parser is not None
        if self._repeated_head:
            return
        self._in_head = False
        self._head_size = self._trailers = self._since_body = self._fed = self._body_size = 0
        request.method, request.version = parser.get_method().decode("latin-1"), parser.get_http_version()
        self._head_only = request.method == "HEAD"
        self._refusal = self._refusal or refusal(request, self._shared.head_limit)
        if self._refusal or self._last:
            return
        request.keep_alive = parser.should_keep_alive()
        request.upgrades = request.upgrades and parser.should_upgrade()
        if self._answering is None:
            self._answer(request)
        elif len(self._waiting) < MOST_WAITING:
            self._waiting.append(request)
            self._pause_reading()
        else:
            self._last = True

    def on_body(self, part: bytes) -> None:
        request = self._coming
        self._since_body = 0
        self._body_size += len(part)
        if request is not None and not request.done:
            request.feed(part)
            if request.buffered > BODY_AHEAD:
                self._pause_reading()

    def on_message_complete(self) -> None:
        request = self._coming
        if request is not None and request.upgrades:
            request.upgrades = False  # only the head is complete
            return
        self._in_head = True
        if self._refusal:
            return  # the reply to it needs the request's id
        self._coming = None
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
            self._refuse(FAILED)

    def write(self, data: bytes) -> None:
        if not self._unsent and len(data) <= PIECE:
            self._transport.write(data)
            return
        self._unsent.append(memoryview(data))
        self._send_pieces()

    def _send_pieces(self) -> None:
        unsent = self._unsent
        while unsent and not self._blocked:
            first = unsent[0]
            if len(first) > PIECE:
                unsent[0] = first[PIECE:]
            else:
                unsent.popleft()
            self._transport.write(first[:PIECE])

    def read_on(self) -> None:
        if not self._reading and not self._waiting and not self._last and not self.half_closed:
            self._reading = True
            self._transport.resume_reading()

    def answered(self, request: Request) -> None:
        if self.paused is None:
            self._go_on(request)  # otherwise when the reply has left our buffers

    def _go_on(self, request: Request) -> None:
        """To the next request, now that a reply has been sent."""
        self._answering = None
        if not request.complete:
            self._linger()
        elif not request.keep:
            self._close()
        elif self._waiting:
            self._answer(self._waiting.popleft())
            self.read_on()
        elif self._last:
            self._linger()  # what was not read must not reset the connection before the client has read the replies
        elif self.half_closed or self._shared.closing:
            self._close()
        else:
            self.due = self._shared.loop.time() + self._shared.receive_s
            self.read_on()  # reading may have been paused by a large body

    def _close(self) -> None:
        self._last = True
        self.due = self._shared.loop.time() + self._shared.stalled_reader_s
        self._transport.close()

    @property
    def sending(self) -> bool:
        """Whether a reply is complete and the client has not taken all of it."""
        if self._answering is not None:
            return self._answering.done
        return self._transport.get_write_buffer_size() > 0

    def close_when_idle(self) -> None:
        if self._answering is None:
            self._transport.close()

    def expire(self) -> None:
        """The deadline for the client's next step has passed."""
        self.due = None
        if self._coming is not None and not self._last:
            self._refuse(TOO_SLOW)
        elif not self._overdue and self._transport.get_write_buffer_size():
            # The end of the last reply has not been read: that has a deadline of its own.
            self._overdue = self._last = True
            self.due = self._shared.loop.time() + self._shared.stalled_reader_s
        else:
            self._transport.abort()

    def abort(self) -> None:
        self._transport.abort()

    def pause_writing(self) -> None:
        loop = self._shared.loop
        self._blocked = True
        self.write_due = loop.time() + self._shared.stalled_reader_s + NOTICE_S
        if self.paused is None:
            self.paused = loop.create_future()

    def resume_writing(self) -> None:
        self._blocked = False
        self.write_due = None
        self._send_pieces()
        if self._blocked:
            return
        paused, self.paused = self.paused, None
        if paused is not None and not paused.done():
            paused.set_result(None)
        request = self._answering
        if request is not None and request.done:
            self._go_on(request)

    def _pause_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._transport.pause_reading()

    def _linger(self) -> None:
        """Half-close; discard what the client still sends, for a while."""
        self._last = True
        self.due = self._shared.loop.time() + LINGER_S
        if self.half_closed:
            self._transport.close()
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        if not self._reading:
            self._reading = True
            self._transport.resume_reading()

    def _refuse(self, refusal: Refusal) -> None:
        """Reply to something that is not a valid request, and close."""
        self._last = True
        answering = self._answering
        if answering is not None:
            if answering.complete or answering.done:
                return  # only a later request is malformed; the connection ends after this reply
            answering.disconnect()
            if answering.started:
                self._transport.abort()
                return
        self._transport.write(self._reply_to(refusal, answering or self._coming))
        self._linger()

    def _reply_to(self, refusal: Refusal, request: Request | None) -> bytes:
        """The reply, and a line in the log under the same request id. `request`: as far as it has arrived."""
        headers = {} if request is None else dict(request.headers)
        id = request_id(headers.get(b"x-request-id"))
        log.info("request refused", extra={"request_id": id, "code": refusal.code, "client": self._address or None})
        return refusal.reply(id, head_only=self._head_only)


def _unreadable(problem: str, data: bytes, in_head: bool) -> Refusal:
    """What to say to bytes that the parser refused; `problem`: in its words."""
    if in_head and data.startswith(_TLS_HANDSHAKE):
        return TLS
    if "PRI/Upgrade" in problem:  # the preface of HTTP/2
        return VERSION
    return FRAMING if "Content-Length" in problem else malformed(problem)
