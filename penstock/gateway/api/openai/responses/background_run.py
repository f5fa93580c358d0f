"""One response in the background: its state in the process that generates it, and the request in memory that does."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from penstock.gateway.accounting.detached import DETACHED
from penstock.gateway.api.openai.responses.background_store import TakenOver, Work
from penstock.gateway.api.openai.responses.renderer import QUEUED_EVENTS
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.app.memory_request import MemoryRequest, Reply
from penstock.identity import Caller
from penstock.protocol.errors import InvalidRequest

BACKGROUND = "penstock.background"
"""Where the ASGI scope of the request in memory has its `BackgroundRun`."""
_KEPT = frozenset(
    (b"content-type", b"traceparent", b"tracestate", b"x-session-id", b"x-feature", b"x-priority"),
)
_KEPT_BEGIN = (b"x-penstock-", b"x-slo-")
"""Headers of the client's request that the one in memory has too, and that are stored with it: those that say how to
answer. Others may hold credentials."""


class BackgroundRun:
    """One response, from its request to its end."""

    def __init__(self, work: Work, caller: Caller) -> None:
        self.work = work
        self.caller = caller
        self.stream = work.stream
        """Whether its events are kept."""
        self.first_event = QUEUED_EVENTS
        """The sequence number of the first event that the model's answer makes."""
        self._charges = 0
        self.goes_on = False
        """Another gateway generates it, or will: what happens here is not its end, and is not billed."""
        self.leased_until = float("inf")
        """In this process's monotonic time, at the latest; later it may be, or have been, another gateway's."""
        self.id = ""
        """Known once it is accepted."""
        self.response: dict[str, Any] = {}
        self.accepted: asyncio.Future[list[tuple[bytes, bytes]]] = asyncio.get_running_loop().create_future()
        """Set to the headers about the answer, with which the client is told that it was."""
        self.ignored: list[str] = []
        self.aborted = asyncio.Event()
        self.woken = asyncio.Event()
        """Set where it must not wait for a place any longer."""
        self.events: list[bytes] = []
        """Those that are not stored yet, in the order of their sequence numbers, if events are kept."""
        self.stored_events = 0
        """The sequence number of the first in memory; those before are only in the store."""
        self.news = asyncio.Event()
        self.begun = False
        """It has left the queue."""
        self.begun_stored = False
        self.ended = False
        """Its end has been written, or is being written."""
        self.over = False
        """There will be no more events."""
        self.failure: bytes | None = None
        """The response as a broken stream left it."""
        self.reply: Reply | None = None
        """To the last attempt."""

    @classmethod
    def asked(cls, exchange: Exchange, body: bytes, *, stream: bool) -> BackgroundRun:
        """Of a client's request."""
        caller = exchange.caller
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in exchange.scope["headers"]
            if name in _KEPT or name.startswith(_KEPT_BEGIN)
        ]
        headers.append(("x-request-id", exchange.request_id))
        try:
            text = body.decode()
        except UnicodeDecodeError:  # in a place that nothing has read yet
            raise InvalidRequest("The request body is not valid UTF-8.", code="invalid_json") from None
        return cls(Work(exchange.path, text, headers, caller.tenant, caller.key, stream), caller)

    @classmethod
    def taken_over(cls, found: TakenOver, caller: Caller) -> BackgroundRun:
        """Of a response that another gateway has begun: clients know of it already."""
        run = cls(found.work, caller)
        run.id, run.response = found.id, found.response
        if run.stream:
            run.first_event = run.stored_events = found.first_event
        run.accepted.set_result([])
        return run

    def next_charge_id(self) -> str:
        id = self.id.removeprefix("resp_")
        self._charges += 1
        return id if self._charges == 1 or not id else uuid.uuid5(uuid.NAMESPACE_URL, f"{id}/{self._charges}").hex

    def record(self, events: Sequence[bytes]) -> None:
        if self.stream and events:
            self.events += events
            self.tell()

    def tell(self) -> None:
        """Wake those that wait for news."""
        self.news.set()
        self.news = asyncio.Event()

    @property
    def event_count(self) -> int:
        return self.stored_events + len(self.events)

    def unstored(self) -> tuple[int, bytes]:
        return self.stored_events, b"".join(self.events)

    def forget_events(self, count: int) -> None:
        """The first `count` of those in memory are stored."""
        del self.events[:count]
        self.stored_events += count


def background_run(exchange: Exchange) -> BackgroundRun | None:
    """The response in the background that a request generates; None for requests of clients."""
    run: BackgroundRun | None = exchange.scope.get(BACKGROUND)
    return run


class WorkRequest(MemoryRequest):
    """The request that generates a response. Its stream goes to the run, by way of the renderer."""

    def __init__(self, run: BackgroundRun) -> None:
        work = run.work
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in work.headers]
        marks = {BACKGROUND: run, DETACHED: run}
        super().__init__(work.path, work.body.encode(), run.caller, run.aborted, headers, marks)

    def _written(self, part: bytes) -> None:
        if self._reply.status != 200:
            super()._written(part)
