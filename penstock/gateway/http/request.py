"""One request of a connection and its reply, as an ASGI application sees them.

`receive` gives the body as it arrives and then waits for the client to disconnect; code that only needs to know of the
disconnect registers a callback (`on_disconnect`), which costs no task. `send` writes: the head waits for the first part
of the body, so that a short reply is one packet, and a client that does not read delays only its own reply.
"""

from __future__ import annotations

import asyncio
import http
import time
from collections.abc import Callable, MutableMapping, Sequence
from email.utils import formatdate
from typing import Any, Protocol
from urllib.parse import unquote

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Callback = Callable[[], None]

ON_DISCONNECT = "penstock.on_disconnect"
"""Key of a scope: a function that registers the callback for a disconnect of the client; None removes it."""
_STATUS = {status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in http.HTTPStatus}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
COPIED = 64 * 1024
"""A larger body is not copied to be sent together with its head."""
_BODILESS = frozenset((204, 304))
_DISCONNECT: Message = {"type": "http.disconnect"}


class Wire(Protocol):
    """What a request needs of its connection."""

    paused: asyncio.Future[None] | None
    """Resolved when the socket accepts data again; None while it does."""

    def write(self, data: bytes) -> None: ...

    def read_on(self) -> None:
        """Resume reading: more of the body fits into the buffer."""

    def answered(self, request: Request) -> None:
        """The reply is complete."""


class Request:
    """Filled by the connection, read and answered by the application."""

    __slots__ = (
        "_callback",
        "_chunked",
        "_events",
        "_head",
        "_loop",
        "_parts",
        "_told",
        "_waiter",
        "_wire",
        "buffered",
        "complete",
        "disconnected",
        "done",
        "expects",
        "headers",
        "keep",
        "keep_alive",
        "method",
        "started",
        "target",
        "upgrades",
        "version",
    )

    def __init__(self, wire: Wire, loop: asyncio.AbstractEventLoop) -> None:
        self._wire = wire
        self._loop = loop
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.method = ""
        self.version = "1.1"
        self.keep_alive = True
        self.buffered = 0
        """Bytes of the body that the application has not read yet."""
        self.complete = False
        """Whether all of the body has arrived."""
        self.disconnected = False
        self.started = False
        self.done = False
        """Whether the reply is complete."""
        self._parts: list[bytes] = []
        self._told = False
        """Whether the application has been told that the body is complete."""
        self.expects = False
        """Whether the client waits for `100 Continue` before it sends the body."""
        self.upgrades = False
        """Whether the client offers to change the protocol."""
        self._waiter: asyncio.Future[None] | None = None
        self._callback: Callback | None = None
        self._head = b""
        self._chunked = False
        self._events = False
        """Whether the reply is a stream of server-sent events."""
        self.keep = True
        """Whether the connection may be used again after this reply."""

    def scope(self, scheme: dict[str, Any]) -> Scope:
        """The ASGI scope, once the head has arrived. `scheme`: the part that all requests of the connection share."""
        path, _, query = self.target.partition(b"?")
        text = path.decode("latin-1")
        return {
            **scheme,
            "method": self.method,
            "http_version": self.version,
            "path": unquote(text) if "%" in text else text,
            "raw_path": path,
            "query_string": query,
            "headers": self.headers,
            ON_DISCONNECT: self.on_disconnect,
        }

    def feed(self, part: bytes) -> None:
        self._parts.append(part)
        self.buffered += len(part)
        self._wake()

    def end(self) -> None:
        self.complete = True
        self._wake()

    def disconnect(self) -> None:
        """The client has disconnected."""
        self.disconnected = True
        self._wake()
        callback, self._callback = self._callback, None
        if callback is not None and not self.done:
            callback()

    def on_disconnect(self, callback: Callback | None) -> None:
        self._callback = callback
        if callback is not None and self.disconnected:
            self._loop.call_soon(callback)

    async def receive(self) -> Message:
        while True:
            if self._parts or (self.complete and not self._told):
                body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._parts.clear()
                self.buffered = 0
                self._told = self.complete
                if not self.complete:
                    self._wire.read_on()
                return {"type": "http.request", "body": body, "more_body": not self.complete}
            if self.disconnected or self.done:
                return _DISCONNECT
            if self.expects and not self.started:
                self.expects = False
                self._wire.write(CONTINUE)
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def send(self, message: Message) -> None:
        if self.disconnected:
            raise ConnectionResetError("the client has disconnected")
        if message["type"] == "http.response.start":
            self._begin(message["status"], message["headers"])
            return
        if not self.started or self.done:
            raise RuntimeError("a response has one start, then its body, then an end")
        more: bool = message.get("more_body", False)
        body: bytes = message.get("body", b"")
        if self._chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more:
                body += b"0\r\n\r\n"
        elif self.method == "HEAD":
            body = b""
        if self._head:
            head, self._head = self._head, b""
            if len(body) > COPIED:
                self._wire.write(head)  # not joined: large bodies may be files that all connections share
            else:
                body = head + body
        if body:
            self._wire.write(body)
        if not more:
            self.finish()
        elif self._wire.paused is not None:
            await asyncio.shield(self._wire.paused)

    def finish(self) -> None:
        self.done = True
        self._callback = None
        self._wake()
        self._wire.answered(self)

    def probe(self) -> bytes | None:
        """Bytes that mean nothing to a client that still reads and that one which is gone refuses; None: there are
        none before the reply to an HTTP/1.0 request."""
        if not self.started:
            return CONTINUE if self.version == "1.1" else None
        if not self._events or self._head or self.done:
            return b""
        return b"3\r\n:\n\n\r\n" if self._chunked else b":\n\n"

    def _begin(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        if self.started:
            raise RuntimeError("a response has one start")
        self.started = True
        given = dict(headers)
        sized = b"content-length" in given or status in _BODILESS
        closes = given.get(b"connection", b"").lower() == b"close"
        lines = [_STATUS.get(status) or b"HTTP/1.1 %d \r\n" % status]
        lines += [b"%b: %b\r\n" % header for header in headers]
        if not sized and self.version == "1.1":
            self._chunked = self.method != "HEAD"
            lines.append(b"transfer-encoding: chunked\r\n")
        self._events = given.get(b"content-type", b"").startswith(b"text/event-stream")
        # Without a length, the end of the connection ends the body; and the unread rest of a request body would be
        # taken for the next request.
        self.keep = self.keep_alive and not closes and (sized or self.version == "1.1") and self.complete
        if not self.keep and not closes:
            lines.append(b"connection: close\r\n")
        elif self.keep and self.version == "1.0":
            lines.append(b"connection: keep-alive\r\n")
        lines.append(_date())
        self._head = b"".join(lines)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


_dated: tuple[int, bytes] = (0, b"")


def _date() -> bytes:
    """The date header and the end of the head; computed once a second."""
    global _dated
    now = int(time.time())
    if _dated[0] != now:
        _dated = (now, f"date: {formatdate(now, usegmt=True)}\r\n\r\n".encode())
    return _dated[1]
