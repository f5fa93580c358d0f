"""One HTTP request and its answer, directly on ASGI.

Invariant: exactly one response start is sent; every response carries `x-request-id`. A handler either answers
or raises; `penstock.gateway.app.asgi` renders what was raised.
"""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar, cast

import msgspec

from penstock.errors import PenstockError
from penstock.gateway.app.bodies import ArrivingBody, Bodies
from penstock.gateway.app.dialects import OPENAI, Dialect
from penstock.gateway.app.encodings import inflater
from penstock.gateway.app.unknown_fields import ignored_header
from penstock.gateway.http.request import ON_DISCONNECT, Message, Scope
from penstock.gateway.http.request_id import request_id
from penstock.identity import OPEN_CALLER, Caller
from penstock.identity.labels import NO_DEMAND, Demand
from penstock.metering.audit import Outcome
from penstock.protocol.errors import ApiError, PayloadTooLarge, RequestTimeout
from penstock.telemetry.logging import RequestRecord
from penstock.telemetry.timeline import Timeline

T = TypeVar("T")
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

JSON = b"application/json"
IGNORED = b"x-penstock-ignored"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
DISCARD_LIMIT = 64 * 2**20
"""How much of a body that is too large is read and discarded before the connection is closed."""
DISCARD_S = 1.0
"""How long to wait for more of a body that is announced as too large."""
UPLOAD_IN_MEMORY = 2**20
"""Bytes of an upload that stay in memory while it arrives."""
SLOWEST_UPLOAD = 64 * 1024
"""Bytes a second with which an upload must arrive after its first `receive_s`."""
MOST_DECISIONS = 128
"""Decisions of data rules that are noted for one request; a tool loop could go on for long."""

encode_json = msgspec.json.Encoder().encode


class ClientDisconnected(PenstockError):
    """The client disconnected or stopped reading, so there is nobody to answer."""


class Exchange:
    """A request with its response, used by one coroutine."""

    __slots__ = (
        "_bodies",
        "_given",
        "_receive",
        "_send",
        "_watcher",
        "answering",
        "arms",
        "body_read",
        "body_size",
        "caller",
        "continues",
        "decisions",
        "demand",
        "dialect",
        "documents",
        "extra_headers",
        "handed_over",
        "ignored",
        "ignored_more",
        "limit_scopes",
        "method",
        "padding",
        "path",
        "receive_s",
        "record",
        "refuses_unknown",
        "request_id",
        "route",
        "scope",
        "session",
        "shadow",
        "stalled_reader_s",
        "started_at",
        "status",
        "timeline",
    )

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        stalled_reader_s: float,
        receive_s: float,
        bodies: Bodies,
        refuses_unknown: bool = False,
    ) -> None:
        self.scope = scope
        self._given: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        """The request headers; where a name is repeated, the first value."""
        self._receive = receive
        self._send = send
        self._bodies = bodies
        self._watcher: Callable[[], None] | None = None
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.route = self.path
        self.started_at = time.monotonic()
        self.request_id = request_id(self.header(b"x-request-id"))
        self.status: int | None = None
        self.body_read = False
        self.body_size = 0
        self.answering = False
        """Whether a part of the answer is there, such as the calls of tools, or a stream that is resumed: what follows
        is no first token."""
        self.documents = False
        """Whether the model reads documents that came with the request."""
        self.padding: Callable[[bytes], bytes] | None = None
        """What makes the events of a stream longer, where the client asked for that."""
        self.caller: Caller = OPEN_CALLER
        self.demand: Demand = NO_DEMAND
        """The labels that whatever gets data of this request must have; only ever narrowed."""
        self.decisions: dict[tuple[Outcome, str, str], tuple[str, float]] = {}
        """For the audit log: what data rules decided about what, with the rule and the time."""
        self.dialect: Dialect = OPENAI
        self.stalled_reader_s = stalled_reader_s
        self.receive_s = receive_s
        self.extra_headers: list[tuple[bytes, bytes]] = []
        self.refuses_unknown = refuses_unknown
        """Whether parameters that are not honoured are refused, not ignored and named."""
        self.ignored: list[str] = []
        """Parameters that were ignored; those beyond are counted in `ignored_more`."""
        self.ignored_more = 0
        self.session = (self.header(b"x-session-id") or b"").decode("latin-1")[:256]
        """The session or stored conversation that the request belongs to, if it says so."""
        self.arms: dict[str, str] = {}
        """By experiment, the arm of that conversation."""
        self.continues = ""
        """The id of an earlier response that the request goes on with."""
        self.handed_over = False
        """Another request in memory does what this one asks for, and is counted and logged in its place."""
        self.shadow = False
        """A copy of a client's request, whose answer nobody sees and nobody pays for."""
        self.limit_scopes: dict[str, str] = {}
        """Whose the limits are that may end the answer: `x-penstock-limit-scope` by `x-penstock-limit`."""
        self.record = RequestRecord(self.request_id, self.path, time.time())
        self.timeline = Timeline(self.record, self.started_at)

    def copied(self) -> Exchange:
        """A shadow of this request: the same caller and headers, and nobody who reads the answer."""
        kept = ("type", "http_version", "method", "path", "path_params", "query_string", "headers")
        scope = {name: self.scope[name] for name in kept if name in self.scope}
        scope[ON_DISCONNECT] = lambda callback: None
        copy = Exchange(
            scope,
            _nothing,
            _discarded,
            stalled_reader_s=self.stalled_reader_s,
            receive_s=self.receive_s,
            bodies=self._bodies,
            refuses_unknown=False,
        )
        copy.shadow = copy.body_read = True
        copy.demand, copy.documents = self.demand, self.documents
        copy.caller, copy.route, copy.dialect, copy.body_size = self.caller, self.route, self.dialect, self.body_size
        copy.request_id = copy.record.request_id = self.request_id
        copy.record.route, copy.record.tenant = self.record.route, self.record.tenant
        copy.record.user_id, copy.record.metadata = self.record.user_id, self.record.metadata
        return copy

    def header(self, name: bytes) -> bytes | None:
        return self._given.get(name)

    def headers(self, name: bytes) -> list[bytes]:
        """Every value of a header that may be repeated."""
        return [value for given, value in self.scope["headers"] if given == name]

    def decide(self, outcome: Outcome, kind: str, name: str, rule: str) -> None:
        """Note a decision for the audit log, once."""
        if len(self.decisions) < MOST_DECISIONS:
            self.decisions.setdefault((outcome, kind, name), (rule, time.time()))

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_at

    @property
    def response_started(self) -> bool:
        return self.status is not None

    async def body(self, limit: int) -> bytes:
        """The whole body, without the mark that some systems put in front of UTF-8. It must arrive within `receive_s`,
        so that slow clients cannot hold resources for longer."""
        try:
            return (await _within(self.receive_s, self._read_body(limit))).removeprefix(codecs.BOM_UTF8)
        except TimeoutError:
            raise RequestTimeout(f"The request body did not arrive within {self.receive_s:g} s.") from None

    @asynccontextmanager
    async def upload(self, limit: int) -> AsyncIterator[ArrivingBody]:
        """A body that may be large, once it has arrived; most of it is on disk. It may take `receive_s`, and longer
        the more of it there is, but must not stop for that long."""
        arriving = self._bodies.arriving(self.caller.tenant, UPLOAD_IN_MEMORY)
        self._refuse_announced(limit)
        try:
            await self._read_into(arriving, limit, None, self._next_of_upload)
            yield arriving
        finally:
            arriving.close()

    async def _next_of_upload(self, size: int, begun: float) -> Message:
        left = begun + self.receive_s + size / SLOWEST_UPLOAD - time.monotonic()
        try:
            return await _within(min(max(left, 0.001), self.receive_s), self._receive())
        except TimeoutError:
            raise RequestTimeout(
                f"The request body stopped for {self.receive_s:g} s, or arrived with less than {SLOWEST_UPLOAD} bytes "
                "a second."
            ) from None

    async def _read_body(self, limit: int) -> bytes:
        self._refuse_announced(limit)
        message = await self._next_part(limit, self._receive())
        body: bytes = message.get("body", b"")
        size = len(body)
        # `more_body` becomes false only with another message; the announced length tells at once.
        whole = size == self._content_length() or not message.get("more_body", True)
        if whole and size <= limit and message["type"] == "http.request" and b"content-encoding" not in self._given:
            self._note_arrived(size)
            return body
        arriving = self._bodies.arriving(self.caller.tenant, limit)
        try:
            await self._read_into(arriving, limit, message, lambda size, begun: self._receive())
            return await arriving.read()
        finally:
            arriving.close()

    async def _read_into(
        self,
        arriving: ArrivingBody,
        limit: int,
        message: Message | None,
        receive: Callable[[int, float], Awaitable[Message]],
    ) -> None:
        """Read a body; `message`: the first part, if it has been received; `receive`: waits for the next one, given
        the size and the time so far."""
        announced = self._content_length()
        decoder = inflater(self.header(b"content-encoding"))
        begun = time.monotonic()
        size = decoded = 0
        while True:
            if message is None:
                message = await self._next_part(limit, receive(size, begun))
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            part: bytes = message.get("body", b"")
            size += len(part)
            if decoder is not None and part and decoded <= limit:
                part = await asyncio.to_thread(decoder.feed, part, limit + 1 - decoded)
            decoded += len(part)
            if decoded <= limit:
                await arriving.add(part)
            elif size > limit + DISCARD_LIMIT:
                raise PayloadTooLarge(limit=limit)
            else:
                arriving.close()  # keep reading: a client that is still sending would not see the reply
            if size == announced or not message.get("more_body", False):
                break
            message = None
        self._note_arrived(decoded)
        if decoded > limit:
            raise PayloadTooLarge(limit=limit, size=None if decoder is not None else decoded)
        if decoder is not None:
            decoder.finish()

    def _refuse_announced(self, limit: int) -> None:
        """Refuse at once what is announced as too large, unless its client is sending it and would not see the reply
        before the end: one that waits for `100 Continue` has not begun, and of more than `DISCARD_LIMIT` the end is
        not read anyway."""
        announced = self._content_length()
        most = limit if b"expect" in self._given else limit + DISCARD_LIMIT
        if announced is not None and announced > most:
            raise PayloadTooLarge(limit=limit, size=announced)

    async def _next_part(self, limit: int, wait: Awaitable[Message]) -> Message:
        """The next part of a body. One that is announced as too large is refused as soon as its client stops."""
        announced = self._content_length()
        if announced is None or announced <= limit:
            return await wait
        try:
            return await _within(min(DISCARD_S, self.receive_s), wait)
        except TimeoutError:
            raise PayloadTooLarge(limit=limit, size=announced) from None

    def _note_arrived(self, size: int) -> None:
        self.body_read = True
        self.body_size = size
        self.timeline.follow("receive")

    def _content_length(self) -> int | None:
        given = self.header(b"content-length")
        return int(given) if given is not None and given.isdigit() else None

    @contextmanager
    def watched(self, fail: Callable[[Exception], None]) -> Iterator[None]:
        """In this context `fail` is called as soon as the client disconnects, whatever the handler is doing. In an
        inner one only the inner `fail` is called."""
        on_disconnect, outer = self.scope[ON_DISCONNECT], self._watcher
        self._watcher = lambda: fail(ClientDisconnected())
        on_disconnect(self._watcher)
        try:
            yield
        finally:
            self._watcher = outer
            on_disconnect(outer)

    async def reply(self, status: int, body: bytes, content_type: bytes = JSON, headers: Headers = ()) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [*self._headers(content_type), length, *headers])
        await self._guarded({"type": "http.response.body", "body": body, "more_body": False})

    async def reply_json(self, value: object, status: int = 200) -> None:
        await self.reply(status, encode_json(value))

    async def reply_parts(self, parts: AsyncIterator[bytes], length: int, content_type: bytes) -> None:
        """Reply with a body that is not in memory as a whole."""
        await self._start(200, [*self._headers(content_type), (b"content-length", str(length).encode())])
        async for part in parts:
            await self.write(part)
        await self.end_stream()

    async def reply_error(self, error: ApiError) -> None:
        headers = [(name.encode(), value.encode()) for name, value in error.headers().items()]
        await self.reply(error.status, encode_json(self.dialect.error(error, self.request_id)), headers=headers)

    async def start_stream(self, content_type: bytes = EVENT_STREAM) -> None:
        await self._start(
            200, [*self._headers(content_type), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        )

    async def write(self, data: bytes) -> None:
        data = data if self.padding is None else self.padding(data)
        await self._guarded({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self, data: bytes = b"") -> None:
        data = data if self.padding is None else self.padding(data)
        await self._guarded({"type": "http.response.body", "body": data, "more_body": False})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head, which is written together with the first part of the body, so this never blocks."""
        try:
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
        except ConnectionResetError:
            raise ClientDisconnected from None
        self.status = status

    async def _guarded(self, message: Message) -> None:
        """Send a message. It blocks while the client's socket buffer is full; only then is a timeout needed."""
        try:
            await _within(self.stalled_reader_s, self._send(message))
        except ConnectionResetError:
            raise ClientDisconnected from None
        except TimeoutError:
            raise StalledReader from None

    def _headers(self, content_type: bytes) -> list[tuple[bytes, bytes]]:
        headers = [
            (b"content-type", content_type),
            *((name, self.request_id.encode()) for name in self.dialect.id_headers),
            (b"openai-processing-ms", str(round(self.elapsed_s * 1000)).encode()),
            *self.extra_headers,
        ]
        if self.ignored:
            headers.append((IGNORED, ignored_header(self.ignored, self.ignored_more)))
        if not self.body_read and self.method == "POST" and self.scope["http_version"].startswith("1"):
            headers.append((b"connection", b"close"))  # the unread rest of the body would be taken for the next request
        return headers


class StalledReader(ClientDisconnected):
    """The client keeps its connection open but has not read anything for too long."""


async def _nothing() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _discarded(message: Message) -> None:
    return


async def _within(seconds: float, work: Awaitable[T]) -> T:
    """Await `work` with a timeout, which is only set up when `work` really has to wait."""
    steps = work.__await__()
    try:
        waiting_for = next(steps)
    except StopIteration as ended:
        return cast(T, ended.value)
    async with asyncio.timeout(seconds):
        return cast(T, await _Rest(waiting_for, steps))


class _Rest:
    """The rest of an awaitable after its first step."""

    def __init__(self, waiting_for: Any, steps: Generator[Any, Any, Any]) -> None:
        self._waiting_for = waiting_for
        self._steps = steps

    def __await__(self) -> Generator[Any, Any, Any]:
        waiting_for = self._waiting_for
        try:
            while True:
                try:
                    yield waiting_for
                except BaseException as error:  # such as the end of a shorter timeout inside
                    waiting_for = self._steps.throw(error)
                else:
                    return (yield from self._steps)
        except StopIteration as ended:
            return ended.value
