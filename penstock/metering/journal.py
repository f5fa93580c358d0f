"""Writing to the ledger from a gateway: many requests, few transactions, and nobody waits for more than his own entry.

Entries gather while a transaction is under way and go together in the next one (group commit). The beginning of a
charge is written after `GATHER_S`, or when somebody waits for it, so that a short answer is one transaction. How far an
open charge is goes along with whatever is written next, `NOTE_S` after it was said at the latest: what is left when
gateway and engine die together is older than that by one transaction at most. While the store is away, or its disk
full, entries stay and are written when it is back; `lag_s` says how long the oldest has waited. Whoever waits for one
is told after `patience_s` that it is not written yet, and from then on new charges are refused, before any token
exists. So the queue is bounded, and nobody hangs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from penstock.metering.ledger import Charge, Ledger, Settlement, entered, progressed
from penstock.protocol.errors import LedgerUnavailable
from penstock.storage import DatabaseError

log = logging.getLogger(__name__)

MOST_WAITING = 100_000
MOST_TOGETHER = 1_000
RETRY_S = 0.5
GATHER_S = 0.01
NOTE_S = 0.2
PATIENCE_S = 5.0


class Journal:
    """One per gateway process; `run` is its task."""

    def __init__(
        self, ledger: Ledger, clock: Callable[[], float] = time.monotonic, *, patience_s: float = PATIENCE_S
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._patience_s = patience_s
        self._waiting: deque[tuple[Charge | Settlement, asyncio.Future[bool], float]] = deque()
        self._progress: dict[str, tuple[int, int]] = {}
        self._wake = asyncio.Event()
        self._later: asyncio.TimerHandle | None = None
        self._noting: asyncio.TimerHandle | None = None
        """While a count waits that no transaction has taken up."""
        self._task: asyncio.Task[None] | None = None
        self._late: asyncio.TimerHandle | None = None
        """While something waits. A timer outlives many entries: one for each would cost as much as writing it."""
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
        for timer in (self._later, self._noting, self._late):
            if timer is not None:
                timer.cancel()
        if self._waiting:
            log.error("%d ledger entries could not be written; they are settled at the next start", len(self._waiting))

    @property
    def lag_s(self) -> float:
        return self._clock() - self._waiting[0][2] if self._waiting else 0.0

    def open(self, charge: Charge) -> asyncio.Future[bool]:
        """Whether the charge is in the ledger, when it is or has waited too long. Nothing may be delivered before."""
        if len(self._waiting) >= MOST_WAITING or self.lag_s > self._patience_s:
            raise LedgerUnavailable
        written = self._add(charge)
        if self._later is None and not self._wake.is_set():
            self._later = asyncio.get_running_loop().call_later(GATHER_S, self._gathered)
        return written

    def _gathered(self) -> None:
        self._later = None
        if self._waiting and not self._wake.is_set():
            left = GATHER_S - self.lag_s
            if left > 0:  # what the timer was set for has been written with something else
                self._later = asyncio.get_running_loop().call_later(left, self._gathered)
            else:
                self._wake.set()

    def hurry(self) -> None:
        """Write what waits now."""
        if self._waiting:
            self._wake.set()

    def settle(self, settlement: Settlement) -> asyncio.Future[bool]:
        """The same for the end of the charge. Never refused: it was admitted."""
        self._progress.pop(settlement.charge.id, None)
        written = self._add(settlement)
        self._wake.set()
        return written

    def amend(self, written: asyncio.Future[bool], settlement: Settlement) -> None:
        """Put another end in the place of one that has not been written."""
        for index, (_, future, at) in enumerate(self._waiting):
            if future is written:
                self._waiting[index] = (settlement, future, at)
                return

    def note(self, id: str, cached_tokens: int, completion_tokens: int) -> None:
        """How far an open charge is; only the newest count matters. It waits for the next transaction, or `NOTE_S`."""
        self._progress[id] = (cached_tokens, completion_tokens)
        if self._noting is None:
            self._noting = asyncio.get_running_loop().call_later(NOTE_S, self._write_notes)

    def _write_notes(self) -> None:
        self._noting = None
        self._wake.set()

    def _add(self, entry: Charge | Settlement) -> asyncio.Future[bool]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        self._waiting.append((entry, future, self._clock()))
        if self._late is None:
            self._late = loop.call_later(self._patience_s, self._tell_late)
        return future

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if not (self._waiting or self._progress):
                continue
            if len(self._waiting) > MOST_TOGETHER:
                self._wake.set()
            if not await self._write():
                await asyncio.sleep(RETRY_S)
                self._wake.set()

    async def _write(self) -> bool:
        """One transaction; what it held stays in the queue until it is done."""
        count = min(len(self._waiting), MOST_TOGETHER)
        notes = dict(self._progress)
        if self._noting is not None:  # what is said from here on waits for the next one
            self._noting.cancel()
            self._noting = None
        entries = [entry for entry, _, _ in itertools.islice(self._waiting, count)]
        try:
            # Repeating or reordering them changes nothing.
            await self._ledger.write([*entered(entries, again=not self.store_up), *progressed(notes)])
        except Exception as error:
            self._tell_late()
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
                future.set_result(True)
        return True

    def _tell_late(self) -> None:
        """Nobody waits any longer for what has not been written for so long."""
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if not self._waiting:
            return
        now, next_s = self._clock(), RETRY_S
        for _, future, since in self._waiting:
            if future.done():
                continue
            if since > now - self._patience_s:
                next_s = since + self._patience_s - now
                break
            future.set_result(False)
        self._late = asyncio.get_running_loop().call_later(next_s, self._tell_late)
