"""One response in the background: its state in the process that generates it, and the request in memory that does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from penstock.gateway.app.exchange import Exchange
from penstock.gateway.app.memory_request import MemoryRequest, Reply
from penstock.identity import Caller

BACKGROUND = "penstock.background"
"""Where the ASGI scope of the request in memory has its `BackgroundRun`."""
_DROPPED = frozenset(
    (
        *(b"authorization", b"x-api-key", b"cookie", b"origin", b"referer", b"connection", b"expect"),
        *(b"content-length", b"content-encoding", b"transfer-encoding", b"last-event-id", b"x-request-id"),
    )
)
"""Headers of the client's request that do not belong to the one in memory: the caller and the body are known."""


class BackgroundRun:
    """One response, from its request to its end."""

    def __init__(self, exchange: Exchange, body: bytes, *, stream: bool) -> None:
        self.caller: Caller = exchange.caller
        self.body = body
        self.stream = stream
        """Whether its events are kept."""
        self.path = exchange.path
        self.request_headers = [pair for pair in exchange.scope["headers"] if pair[0] not in _DROPPED]
        self.request_headers.append((b"x-request-id", exchange.request_id.encode()))
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
        """How many are only in the store."""
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
        super().__init__(run.path, run.body, run.caller, run.aborted, run.request_headers, {BACKGROUND: run})

    def _written(self, part: bytes) -> None:
        if self._reply.status != 200:
            super()._written(part)
