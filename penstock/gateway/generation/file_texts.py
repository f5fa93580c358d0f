"""Texts of documents that were read already: a PDF that a thousand lines of a batch name is read once.

Invariants: a text is found only by whoever sent the same bytes before: the tenant, and with a user's key the user. So
nobody can tell from the time an answer takes what others have sent. Texts take at most `limit` bytes, of which a tenant
takes at most half. What is used least recently goes first.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from penstock.knowledge.entities import UnreadableDocument
from penstock.telemetry.exposition import MetricRegistry

FAILURE_S = 600.0
"""How long it is known that a document cannot be read: that may have been for lack of time."""
OVERHEAD = 512
"""Bytes that an entry takes besides its text."""


@dataclass(frozen=True, slots=True)
class Owner:
    tenant: str
    user: str | None
    """Set for callers that see only what is theirs."""


@dataclass(frozen=True, slots=True)
class Key:
    owner: Owner
    digest: bytes

    @classmethod
    def of(cls, owner: Owner, body: bytes) -> Key:
        return cls(owner, hashlib.sha256(body).digest())


@dataclass(frozen=True, slots=True)
class _Entry:
    text: str
    error: str
    size: int
    until: float


@dataclass(slots=True)
class _Turn:
    lock: asyncio.Lock
    users: int = 0


class FileTexts:
    """See above. For one gateway process."""

    def __init__(self, limit: int, metrics: MetricRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._tenants: dict[str, OrderedDict[Key, None]] = {}
        self._sizes: dict[str, int] = {}
        self._turns: dict[Key, _Turn] = {}
        self.size = 0
        self._lookups = metrics.counter(
            "penstock_input_file_lookups_total",
            "PDFs of requests, by whether their text was known (hit) or had to be read (miss).",
            ("outcome",),
        )
        self._bytes = metrics.gauge("penstock_input_file_cache_bytes", "Memory that texts of PDFs take.").child()

    async def text(self, key: Key, read: Callable[[], Awaitable[str]]) -> str:
        """The text of a document; `read` finds it out. Who asks for one that is being read waits for that."""
        async with self._turn(key):
            found = self._get(key)
            self._lookups.child("miss" if found is None else "hit").inc()
            if found is None:
                try:
                    text = await read()
                except UnreadableDocument as error:
                    self._put(key, "", str(error), self._clock() + FAILURE_S)
                    raise
                self._put(key, text, "", float("inf"))
                return text
        if found.error:
            raise UnreadableDocument(found.error)
        return found.text

    @asynccontextmanager
    async def _turn(self, key: Key) -> AsyncIterator[None]:
        turn = self._turns.setdefault(key, _Turn(asyncio.Lock()))
        turn.users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.users -= 1
            if not turn.users:
                del self._turns[key]

    def _get(self, key: Key) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.until <= self._clock():
            self._drop(key)
            return None
        self._entries.move_to_end(key)
        self._tenants[key.owner.tenant].move_to_end(key)
        return entry

    def _put(self, key: Key, text: str, error: str, until: float) -> None:
        size = sys.getsizeof(text) + sys.getsizeof(error) + OVERHEAD
        if size > self._limit // 2:
            return
        if key in self._entries:
            self._drop(key)
        tenant = key.owner.tenant
        self._entries[key] = _Entry(text, error, size, until)
        self._tenants.setdefault(tenant, OrderedDict())[key] = None
        self._sizes[tenant] = self._sizes.get(tenant, 0) + size
        self.size += size
        while self._sizes[tenant] > self._limit // 2:
            self._drop(next(iter(self._tenants[tenant])))
        while self.size > self._limit:
            self._drop(next(iter(self._entries)))
        self._bytes.set(self.size)

    def _drop(self, key: Key) -> None:
        tenant, entry = key.owner.tenant, self._entries.pop(key)
        del self._tenants[tenant][key]
        self._sizes[tenant] -= entry.size
        self.size -= entry.size
        self._bytes.set(self.size)
        if not self._tenants[tenant]:
            del self._tenants[tenant], self._sizes[tenant]
