"""The connections of one listener: how many there may be, which of them are overdue, and the application they serve."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from penstock.gateway.http.request import Message, Scope

if TYPE_CHECKING:
    from penstock.gateway.http.connection import Connection

Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Failure = Callable[[Exception, Scope, Receive, Send | None], Awaitable[None]]
"""Called with an exception that the application did not catch. The last argument sends a reply; it is None when a reply
has begun already."""


class Connections:
    """The state that the connections of one listener share."""

    def __init__(
        self,
        app: Application,
        failed: Failure,
        *,
        head_limit: int,
        receive_s: float,
        stalled_reader_s: float,
        room: int,
        room_per_address: int | None,
    ) -> None:
        """`room`: the most connections, and `room_per_address` those of one address; further ones are answered with
        503."""
        self.app = app
        self.failed = failed
        self.head_limit = head_limit
        self.receive_s = receive_s
        self.stalled_reader_s = stalled_reader_s
        self.room = room
        self.room_per_address = room_per_address
        self.loop = asyncio.get_running_loop()
        self.open: set[Connection] = set()
        self.of_address: Counter[str] = Counter()
        self.tasks: set[asyncio.Task[None]] = set()
        self.closing = False

    def sweep(self) -> None:
        """Close connections whose deadline has passed."""
        now = self.loop.time()
        for connection in list(self.open):
            if connection.due is not None and connection.due <= now:
                connection.expire()
            elif connection.write_due is not None and connection.write_due <= now:
                connection.abort()
            elif connection.half_closed:
                connection.look_closely()

    def admit(self, connection: Connection, address: str) -> bool:
        if self.closing or len(self.open) >= self.room:
            return False
        if self.room_per_address is not None and self.of_address[address] >= self.room_per_address:
            return False
        self.open.add(connection)
        self.of_address[address] += 1
        return True

    def forget(self, connection: Connection, address: str) -> None:
        if connection in self.open:
            self.open.remove(connection)
            self.of_address[address] -= 1
            if not self.of_address[address]:
                del self.of_address[address]
