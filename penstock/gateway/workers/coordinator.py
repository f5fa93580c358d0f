"""The coordinator of the gateway workers on one machine: it counts limits, merges metrics, remembers the load of recent
hours and passes on key changes.

It runs in the supervisor, which outlives every worker, so it is available whenever a worker needs it. Invariants: a
limit holds over all workers together; when a worker dies, the concurrency it held is released (the rest of its
reservations stays counted in full, since the real usage is unknown) and no counter in the metrics decreases.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.gateway.workers.messages import (
    Ask,
    Change,
    Changed,
    Collect,
    Collected,
    CoordinatorProtocolError,
    Decided,
    Found,
    Frames,
    Join,
    Known,
    Noted,
    Recall,
    Recalled,
    Report,
    Reserve,
    Seek,
    Settle,
    Sought,
    ToCoordinator,
    Told,
    ToWorker,
    coordinator_decoder,
    frame,
)
from penstock.limits import Amounts, Limit
from penstock.limits.memory import MemoryLimits
from penstock.telemetry.aggregation import lasting, merged
from penstock.telemetry.exposition import Readings
from penstock.telemetry.load_history import LoadHistory, keep, needed
from penstock.telemetry.timeline import Shown, TraceQuery

ANSWER_S = 1.0
"""How long to wait for a busy worker; after that, a scrape shows its last readings."""
MOST_UNREAD = 2**20
"""Bytes that a worker may leave unread; beyond that nothing is sent to it."""

log = logging.getLogger("penstock.supervisor")


class _Worker:
    """One connected worker."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.name = "?"
        self.joined = False
        self.held: dict[str, tuple[list[Limit], Amounts]] = {}
        self.readings: list[Readings] = []
        self.answered = 0
        self.heard = asyncio.Event()

    def tell(self, message: ToWorker) -> None:
        if self.writer.transport.get_write_buffer_size() < MOST_UNREAD:
            self.writer.write(frame(message))


class _Round:
    """A message to several workers, and those that have not replied yet."""

    def __init__(self, waiting: set[_Worker]) -> None:
        self.waiting = waiting
        self.traces: list[Shown] = []
        self.done = asyncio.Event()
        self.without()

    def without(self, worker: _Worker | None = None) -> None:
        if worker is not None:
            self.waiting.discard(worker)
        if not self.waiting:
            self.done.set()


class WorkerCoordinator:
    """Serves the workers of one supervisor; an async context manager."""

    def __init__(self, path: Path, limits: MemoryLimits | None = None) -> None:
        self._path = path
        self._limits = limits or MemoryLimits()
        self._workers: set[_Worker] = set()
        self._departed: list[Readings] = []
        self._history = LoadHistory()
        self._asked = 0
        self._rounds: dict[int, _Round] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def workers(self) -> int:
        """The number of workers that have joined and are connected."""
        return sum(worker.joined for worker in self._workers)

    async def __aenter__(self) -> WorkerCoordinator:
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        self._path.chmod(0o600)
        self._spawn(keep(self._history, self._load_readings), "load history")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._spawn(self._converse(reader, writer), "worker connection")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker = _Worker(writer)
        frames = Frames(reader, coordinator_decoder)
        self._workers.add(worker)
        try:
            while (message := await frames.next()) is not None:
                await self._handle(worker, message)
                await writer.drain()
        except ConnectionError:
            pass  # it died, which is handled like a disconnect
        except CoordinatorProtocolError as error:
            log.error("protocol error of gateway worker %s: %s", worker.name, error)
        finally:
            self._workers.discard(worker)
            worker.heard.set()
            for answers in self._rounds.values():
                answers.without(worker)
            writer.close()
            self._departed = merged([self._departed, lasting(worker.readings)])
            for id, (limits, reserved) in worker.held.items():
                await self._limits.settle(id, limits, reserved, reserved)

    async def _handle(self, worker: _Worker, message: ToCoordinator) -> None:
        match message:
            case Reserve(call, id, limits, amounts):
                decision = await self._limits.reserve(id, limits, amounts)
                if decision.refusal is None:
                    worker.held[id] = (limits, amounts)
                worker.writer.write(frame(Decided(call, decision)))
            case Settle(id, limits, reserved, used):
                if worker.held.pop(id, None) is not None:
                    await self._limits.settle(id, limits, reserved, used)
            case Report(readings, asked):
                worker.readings = readings
                worker.answered = max(worker.answered, asked)
                worker.heard.set()
            case Collect(call, readings):
                worker.readings = readings
                self._spawn(self._collect(worker, call), "collect metrics")
            case Seek(call, query):
                self._spawn(self._seek(worker, call, query), "seek traces")
            case Told(number, traces):
                if (answers := self._rounds.get(number)) is not None and worker in answers.waiting:
                    answers.traces += traces
                    answers.without(worker)
            case Recall(call):
                worker.tell(Recalled(call, self._history.models()))
            case Change(call):
                self._spawn(self._announce(worker, call), "announce a key change")
            case Noted(number):
                if (answers := self._rounds.get(number)) is not None:
                    answers.without(worker)
            case Join(number):
                worker.name, worker.joined = str(number), True

    def _load_readings(self) -> list[Readings]:
        """As reported last, at most a second ago."""
        return merged([*(needed(worker.readings) for worker in self._workers), needed(self._departed)])

    async def _collect(self, asker: _Worker, call: int) -> None:
        self._asked += 1
        number = self._asked
        others = self._workers - {asker}
        for other in others:
            other.tell(Ask(number))
        try:
            async with asyncio.timeout(ANSWER_S):
                for other in others:
                    while other.answered < number and other in self._workers:
                        other.heard.clear()
                        await other.heard.wait()
        except TimeoutError:
            log.warning("a gateway worker did not report its metrics in time; its last report is used")
        known = [worker.readings for worker in self._workers]
        asker.tell(Collected(call, merged([*known, self._departed])))

    async def _seek(self, asker: _Worker, call: int, query: TraceQuery) -> None:
        answers = await self._round(asker, lambda number: Sought(number, query), "its recent requests")
        asker.tell(Found(call, answers.traces))

    async def _announce(self, asker: _Worker, call: int) -> None:
        await self._round(asker, Changed, "a key change")
        asker.tell(Known(call))

    async def _round(self, asker: _Worker, message: Callable[[int], ToWorker], what: str) -> _Round:
        """Send a message to all workers but the one that asks, and wait for their replies, up to `ANSWER_S`."""
        self._asked += 1
        number = self._asked
        answers = self._rounds[number] = _Round(self._workers - {asker})
        for other in tuple(answers.waiting):
            other.tell(message(number))
        try:
            async with asyncio.timeout(ANSWER_S):
                await answers.done.wait()
        except TimeoutError:
            log.warning("a gateway worker did not reply in time: %s", what)
        finally:
            del self._rounds[number]
        return answers
