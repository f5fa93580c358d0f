"""Writes to the ledger from a gateway with group commit: many requests, few transactions.

Entries collect while a transaction is under way and are written together in the next one. The start of a charge is
written after `GATHER_S`, or when a request waits for it, so that a short answer takes one transaction; after `QUICK_S`
where few charges begin, so that no first token waits for it. The progress of open charges is written with the next
transaction, at most `NOTE_S` later: when gateway and engine die together, the stored progress is older than that by at
most one transaction. While the database is unavailable, or its disk full, entries stay queued and are written when it
is back; `lag_s` is the age of the oldest. A request that waits for its entry fails after `patience_s`, and from then on
new charges are refused, before any token exists. So the queue is bounded, and no request hangs. When the database is
gone or damaged, new charges are refused at once.

A database server that is killed takes with it what it had not flushed. So what was written in the last `RECENT_S` is
kept, and written again after a connection was lost.
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
QUICK_S = 0.001
"""The same where few charges begin: the beginning is then in the ledger before the first token comes."""
FEW, FEW_S = 4, 0.02
"""Few charges begin when there were fewer than `FEW` in the last `FEW_S`. That bounds what their own transactions cost:
two hundred of them a second. One request after the other, however short, are few."""
NOTE_S = 0.2
PATIENCE_S = 5.0
RECENT_S = 5.0
"""Longer than a database server keeps what it was told before it flushes; 0.6 s is usual."""


class Journal:
    """One per gateway process; `run` is its task."""

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float] = time.monotonic,
        *,
        patience_s: float = PATIENCE_S,
        announce: Callable[[Settlement], None] | None = None,
    ) -> None:
        """`announce` is told of every settlement that stands in the ledger, after it was written."""
        self._announce = announce
        self._ledger = ledger
        self._clock = clock
        self._patience_s = patience_s
        self._waiting: deque[tuple[Charge | Settlement, asyncio.Future[bool], float]] = deque()
        self._progress: dict[str, tuple[int, int, int]] = {}
        self._recent: deque[tuple[Charge | Settlement, float]] = deque()
        """Written, but perhaps not flushed yet; with the time."""
        self._interruptions = ledger.interruptions
        self._again = False
        """Whether entries may be queued that were written before."""
        self._opened: deque[float] = deque(maxlen=FEW)
        """When the last charges began."""
        self._wake = asyncio.Event()
        self._later: asyncio.TimerHandle | None = None
        self._noting: asyncio.TimerHandle | None = None
        """Set while a progress note waits for a transaction."""
        self._task: asyncio.Task[None] | None = None
        self._late: asyncio.TimerHandle | None = None
        """Set while an entry waits. One timer serves many entries: one for each would cost as much as writing it."""
        self.store_up = True

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="ledger journal")

    async def close(self, within: float = 5.0) -> None:
        """Writes what is queued, then stops."""
        if self._task is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while (self._waiting or self._progress) and self._ledger.problem is None:
                    self._wake.set()
                    await asyncio.sleep(0.01)
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        for timer in (self._later, self._noting, self._late):
            if timer is not None:
                timer.cancel()
        if self._waiting:
            log.error(
                "ledger entries not written at shutdown; they will be settled later, unless the database is lost",
                extra={"entries": len(self._waiting)},
            )

    @property
    def lag_s(self) -> float:
        return self._clock() - self._waiting[0][2] if self._waiting else 0.0

    @property
    def _full(self) -> bool:
        return len(self._waiting) >= MOST_WAITING or self.lag_s > self._patience_s

    @property
    def problem(self) -> str | None:
        """Why charges are refused, or soon will be; None: they are written."""
        if self._ledger.problem is not None:
            return self._ledger.problem
        return "the ledger cannot be written" if self._full or not self.store_up else None

    def open(self, charge: Charge) -> asyncio.Future[bool]:
        """Opens a charge; resolves to True once written, False after `patience_s`. Nothing may be delivered before."""
        if self._full or self._ledger.problem is not None:
            raise LedgerUnavailable
        written = self._add(charge)
        self._opened.append(self._clock())
        if self._later is None and not self._wake.is_set():
            self._later = asyncio.get_running_loop().call_later(self._gather_s, self._gathered)
        return written

    @property
    def _gather_s(self) -> float:
        few = len(self._opened) < FEW or self._clock() - self._opened[0] > FEW_S
        return QUICK_S if few else GATHER_S

    def _gathered(self) -> None:
        self._later = None
        if self._waiting and not self._wake.is_set():
            left = self._gather_s - self.lag_s
            if left > 0:  # the entry of this timer was already written with others
                self._later = asyncio.get_running_loop().call_later(left, self._gathered)
            else:
                self._wake.set()

    def hurry(self) -> None:
        """Writes the queued entries now."""
        if self._waiting or self._interrupted:
            self._wake.set()

    @property
    def _interrupted(self) -> bool:
        return self._ledger.interruptions != self._interruptions

    def _rewrite(self) -> None:
        """Queues again what the database may have forgotten."""
        self._interruptions = self._ledger.interruptions
        self._again, now = True, self._clock()
        written = asyncio.get_running_loop().create_future()
        written.set_result(True)
        self._waiting.extendleft((entry, written, now) for entry, _ in reversed(self._recent))
        self._recent.clear()

    def settle(self, settlement: Settlement) -> asyncio.Future[bool]:
        """Settles a charge, with the same result as `open`. Never refused, because the request was admitted."""
        self._progress.pop(settlement.charge.id, None)
        written = self._add(settlement)
        self._wake.set()
        return written

    def amend(self, written: asyncio.Future[bool], settlement: Settlement) -> None:
        """Replaces a settlement that has not been written yet."""
        for index, (_, future, at) in enumerate(self._waiting):
            if future is written:
                self._waiting[index] = (settlement, future, at)
                return

    def note(self, id: str, cached_tokens: int, completion_tokens: int, reasoning_tokens: int = 0) -> None:
        """Records the progress of an open charge; written with the next transaction, or after `NOTE_S`."""
        self._progress[id] = (cached_tokens, completion_tokens, reasoning_tokens)
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
            if self._interrupted:
                self._rewrite()
            if not (self._waiting or self._progress):
                continue
            if len(self._waiting) > MOST_TOGETHER:
                self._wake.set()
            if not await self._write():
                await asyncio.sleep(RETRY_S)
                self._wake.set()

    async def _write(self) -> bool:
        """Writes one transaction; its entries stay queued until it is done."""
        count = min(len(self._waiting), MOST_TOGETHER)
        notes = dict(self._progress)
        if self._noting is not None:  # later notes wait for the next transaction
            self._noting.cancel()
            self._noting = None
        entries = [entry for entry, _, _ in itertools.islice(self._waiting, count)]
        standing: list[Settlement] = []
        try:
            # Writes are idempotent and may be reordered.
            statements = [*entered(entries, again=self._again or not self.store_up), *progressed(notes)]
            counts = await self._ledger.write(statements)
            if self._announce is not None:
                settlements = [entry for entry in entries if isinstance(entry, Settlement)]
                standing = await self._ledger.standing(settlements, statements, counts)
        except Exception as error:
            self._tell_late()
            if not isinstance(error, DatabaseError):
                log.exception("writing to the ledger failed; retrying")  # the task must continue
            elif self.store_up:
                log.error("ledger cannot be written; entries stay queued", extra={"why": str(error)})
            self.store_up = False
            return False
        if not self.store_up:
            log.info("ledger is writable again")
        self.store_up = True
        for settlement in standing:
            assert self._announce is not None
            self._announce(settlement)
        for id, tokens in notes.items():
            if self._progress.get(id) == tokens:
                del self._progress[id]
        now = self._clock()
        while self._recent and self._recent[0][1] < now - RECENT_S:
            self._recent.popleft()
        for _ in range(count):
            entry, future, _ = self._waiting.popleft()
            if self._interruptions is not None:
                self._recent.append((entry, now))
            if not future.done():
                future.set_result(True)
        self._again = self._again and bool(self._waiting)
        return True

    def _tell_late(self) -> None:
        """Fails the requests whose entries have waited too long."""
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if not self._waiting:
            return
        now, next_s = self._clock(), RETRY_S
        patience_s = self._patience_s if self._ledger.problem is None else 0.0
        for _, future, since in self._waiting:
            if future.done():
                continue
            if since > now - patience_s:
                next_s = since + patience_s - now
                break
            future.set_result(False)
        self._late = asyncio.get_running_loop().call_later(next_s, self._tell_late)
