"""Writing to the ledger from a gateway: many requests, few transactions, and nobody waits for more than his own entry.

Entries gather while a transaction is under way and go together in the next one (group commit). The queue is bounded;
what does not fit is refused at admission, before any token exists. While the store is away entries wait and are written
when it is back; `lag_s` says how long the oldest has waited.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from penstock.metering.ledger import Charge, Ledger, Settlement, opened, progressed, settled
from penstock.protocol.errors import Overloaded
from penstock.storage import DatabaseError, Statement
from penstock.storage.database import merged

log = logging.getLogger(__name__)

MOST_WAITING = 100_000
MOST_TOGETHER = 1_000
RETRY_S = 0.5


class Journal:
    """One per gateway process; `run` is its task."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._waiting: deque[tuple[list[Statement], asyncio.Future[None], float]] = deque()
        self._progress: dict[str, tuple[int, int]] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.store_up = True

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="ledger journal")

    async def close(self, within: float = 5.0) -> None:
        """Write what waits, then stop."""
        if self._task is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while self._waiting or self._progress:
                    self._wake.set()
                    await asyncio.sleep(0.01)
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        if self._waiting:
            log.error("%d ledger entries could not be written; they are settled at the next start", len(self._waiting))

    @property
    def lag_s(self) -> float:
        return self._clock() - self._waiting[0][2] if self._waiting else 0.0

    def open(self, charge: Charge) -> asyncio.Future[None]:
        """Done when the charge is in the ledger. Nothing may be delivered before."""
        if len(self._waiting) >= MOST_WAITING:
            raise Overloaded("The ledger cannot be written at the moment, so no new request is taken.", retry_after=2.0)
        return self._add(opened(charge))

    def settle(self, settlement: Settlement) -> asyncio.Future[None]:
        """Done when the end of the charge is in the ledger. Never refused: it was admitted."""
        self._progress.pop(settlement.charge.id, None)
        return self._add(settled(settlement))

    def note(self, id: str, cached_tokens: int, completion_tokens: int) -> None:
        """How far an open charge is; only the newest count matters, so it waits for the next transaction."""
        self._progress[id] = (cached_tokens, completion_tokens)

    def _add(self, statements: list[Statement]) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((statements, future, self._clock()))
        self._wake.set()
        return future

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.25 if self._progress else None):
                    await self._wake.wait()
            self._wake.clear()
            while self._waiting or self._progress:
                if not await self._write():
                    await asyncio.sleep(RETRY_S)
                if not self._waiting:
                    break

    async def _write(self) -> bool:
        """One transaction; what it held stays in the queue until it is done."""
        count = min(len(self._waiting), MOST_TOGETHER)
        notes = dict(self._progress)
        statements = [statement for index in range(count) for statement in self._waiting[index][0]]
        try:
            # Repeating or reordering them changes nothing.
            await self._ledger.write([*merged(statements), *progressed(notes)])
        except Exception as error:
            if not isinstance(error, DatabaseError):
                log.exception("writing to the ledger failed")  # the task must outlive it
            elif self.store_up:
                log.error("the ledger cannot be written (%s); entries wait", error)
            self.store_up = False
            return False
        if not self.store_up:
            log.info("the ledger is written again")
        self.store_up = True
        for id, tokens in notes.items():
            if self._progress.get(id) == tokens:
                del self._progress[id]
        for _ in range(count):
            _, future, _ = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
        return True
