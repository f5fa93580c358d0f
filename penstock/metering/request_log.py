"""The request log: one entry per request, written in the background in batches to one sink. Sinks for analysis also
get settled charges, votes and grades (`log_entries.py`).

`add` puts an entry into a bounded queue and returns; no request waits for the sink. While the sink is unavailable, or
slower than requests arrive, entries go to a bounded spool on disk and are replayed in order. Entries that do not fit
there are counted as lost. Entries never contain text of prompts or answers.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from penstock.errors import PenstockError
from penstock.metering.log_entries import REQUESTS, Entry, LogEntry, Stream, clean, from_line, stream_of, to_line
from penstock.metering.spool import Spool
from penstock.telemetry.exposition import Value
from penstock.telemetry.logging import RequestRecord

log = logging.getLogger(__name__)
T = TypeVar("T")


def entry_of(record: RequestRecord) -> LogEntry:
    return LogEntry(
        record.request_id,
        clean(record.user_id),
        clean(record.tenant),
        clean(record.model_version),
        clean(record.adapter_id),
        record.prompt_tokens,
        record.cached_tokens,
        record.completion_tokens,
        record.ttft_ms,
        record.total_latency_ms,
        record.finish_reason,
        record.route,
        record.timestamp,
    )


class SinkError(PenstockError):
    """The sink did not accept a batch; it is retried later."""


class Sink(ABC):
    """The destination of entries. It may be unavailable at startup."""

    streams: frozenset[str] = frozenset({REQUESTS.name})
    """What it stores; it is given nothing else."""

    @abstractmethod
    async def write(self, entries: Sequence[Entry]) -> None:
        """Stores a whole batch or raises SinkError. A batch may be written twice."""

    @abstractmethod
    async def close(self) -> None: ...


class LogCounts(msgspec.Struct, frozen=True):
    """Counters: entries written, spooled and lost."""

    written: Value
    spooled: Value
    lost: Value


class RequestLog:
    """One per gateway process: a queue, a task that sends, and a task that spools what cannot be sent."""

    def __init__(
        self,
        sink: Sink,
        spool: Spool,
        counts: LogCounts,
        *,
        capacity: int = 20_000,
        batch: int = 500,
        flush_s: float = 1.0,
        retry_s: float = 2.0,
    ) -> None:
        self.sink = sink
        self._spool = spool
        self._counts = counts
        self._capacity = capacity
        self._batch = batch
        self._flush_s = flush_s
        self._retry_s = retry_s
        self._queue: deque[Entry] = deque()
        self._sending: list[Entry] = []
        """Taken from the queue and not yet acknowledged."""
        self._arrived = asyncio.Event()
        self._batch_full = asyncio.Event()
        self._behind = asyncio.Event()
        """Wakes the spooling task."""
        self._disk = asyncio.Lock()
        self._away = False
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._send(), name="request log"),
            asyncio.create_task(self._spill(), name="request log spool"),
        ]

    def add(self, record: RequestRecord) -> None:
        """Queues the entry of a request. Never waits, never fails."""
        self.put(entry_of(record))

    def takes(self, stream: Stream) -> bool:
        """Whether the sink stores such entries."""
        return stream.name in self.sink.streams

    def put(self, entry: Entry) -> None:
        """Queues an entry, if the sink stores its kind. Never waits, never fails."""
        if stream_of(entry).name not in self.sink.streams:
            return
        waiting = len(self._queue)
        if waiting >= self._capacity or self._closing:
            self._counts.lost.inc()
            return
        self._queue.append(entry)
        self._arrived.set()
        if waiting + 1 >= self._batch:
            self._batch_full.set()
            if self._away or waiting * 2 >= self._capacity or not self._spool.empty:
                self._behind.set()

    async def close(self, within: float = 5.0) -> None:
        """Writes queued entries, or spools them for the next start."""
        if not self._tasks:
            return
        self._closing = True
        self._batch_full.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                # Polled, because it happens once, at the end.
                while (  # noqa: ASYNC110
                    self._queue or self._sending or not self._spool.empty
                ) and not self._away:
                    await asyncio.sleep(0.01)
        sender, spiller = self._tasks
        async with self._disk:  # otherwise entries being spooled right now would be spooled twice
            sender.cancel()
        self._behind.set()
        await asyncio.gather(sender, spiller, return_exceptions=True)
        await self._put_back()
        await self._spill_queue()
        await self.sink.close()
        self._spool.close()

    async def _send(self) -> None:
        while True:
            if self._spool.empty:
                await self._send_queued()
            else:
                await self._replay()
            if self._away:
                await asyncio.sleep(self._retry_s)

    async def _send_queued(self) -> None:
        if not self._queue:
            self._arrived.clear()
            self._batch_full.clear()
            await self._arrived.wait()
        if not self._away and len(self._queue) < self._batch:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._flush_s):
                    await self._batch_full.wait()
        async with self._disk:  # after a spill that is under way, whose entries are older
            if not self._spool.empty:
                return
            self._sending = [self._queue.popleft() for _ in range(min(len(self._queue), self._batch))]
        if len(self._queue) < self._batch and not self._closing:
            self._batch_full.clear()
        if self._sending and await self._write(self._sending):
            self._sending = []
        await self._put_back()

    async def _replay(self) -> None:
        segment, lines = await self._on_disk(self._spool.oldest)
        entries: list[Entry] = []
        for line in lines:
            try:
                entry = from_line(line)
                if self.takes(stream_of(entry)):  # the spool may be from before another sink was configured
                    entries.append(entry)
            except msgspec.DecodeError:  # a partial line: the process died while writing it
                self._counts.lost.inc()
        if not entries or await self._write(entries):
            await self._on_disk(lambda: self._spool.drop(segment))

    async def _write(self, entries: Sequence[Entry]) -> bool:
        try:
            await self.sink.write(entries)
        except SinkError as error:
            if not self._away:
                log.warning("request log sink is unavailable; entries are spooled to disk", extra={"why": str(error)})
            self._away = True
            self._behind.set()
            return False
        if self._away:
            log.info("request log sink is available again")
        self._away = False
        self._counts.written.inc(len(entries))
        return True

    async def _spill(self) -> None:
        """Moves the queue to disk while the sender is stuck or behind, so that it never fills."""
        while not self._closing:
            await self._behind.wait()
            self._behind.clear()
            await self._spill_queue()
            if self._away and not self._closing:
                await asyncio.sleep(min(self._flush_s, self._retry_s))
                self._behind.set()

    async def _put_back(self) -> None:
        await self._keep(self._sending, self._spool.put_back)
        self._sending = []

    async def _spill_queue(self) -> None:
        async with self._disk:
            entries = list(self._queue)
            self._queue.clear()
            await self._keep(entries, self._spool.append, locked=True)

    async def _keep(self, entries: list[Entry], put: Callable[[Sequence[bytes]], int], *, locked: bool = False) -> None:
        if not entries:
            return
        lines = [to_line(entry) for entry in entries]
        try:
            kept = await (asyncio.to_thread(put, lines) if locked else self._on_disk(lambda: put(lines)))
        except OSError as error:
            log.error("request log spool cannot be written; entries are lost", extra={"why": str(error)})
            kept = 0
        self._counts.spooled.inc(kept)
        self._counts.lost.inc(len(entries) - kept)

    async def _on_disk(self, work: Callable[[], T]) -> T:
        async with self._disk:
            return await asyncio.to_thread(work)
