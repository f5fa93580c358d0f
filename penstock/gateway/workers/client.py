"""A worker's connection to the coordinator: calls that wait for a reply, and replies to what the coordinator asks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from penstock.errors import PenstockError
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
    frame,
    worker_decoder,
)
from penstock.limits import Amounts, Decision, Limit, LimitStore
from penstock.protocol.errors import Overloaded
from penstock.telemetry.exposition import Readings
from penstock.telemetry.load_history import ModelHistory
from penstock.telemetry.timeline import Shown, TraceQuery

log = logging.getLogger("penstock.gateway")

Answer: TypeAlias = Decided | Collected | Found | Known | Recalled

REPORT_S = 1.0
"""How old the last known readings of a worker that dies may be."""


class CoordinatorClient:
    """The connection of one worker. When it breaks, the supervisor has died and the worker has to end."""

    def __init__(
        self,
        path: Path,
        worker: int,
        *,
        readings: Callable[[], list[Readings]],
        changed: Callable[[], None],
        traces: Callable[[TraceQuery], list[Shown]],
    ) -> None:
        self._path = path
        self._worker = worker
        self._readings = readings
        self._changed = changed
        self._traces = traces
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = itertools.count(1)
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.lost = asyncio.Event()
        """Set when the connection has broken."""

    async def start(self) -> None:
        try:
            reader, self._writer = await asyncio.open_unix_connection(self._path)
        except OSError as error:
            raise PenstockError(
                f"cannot reach the supervisor's worker coordinator at {self._path}: {error.strerror}"
            ) from error
        self._send(Join(self._worker))
        self._tasks = [
            asyncio.create_task(self._read(Frames(reader, worker_decoder)), name="coordinator reader"),
            asyncio.create_task(self._report(), name="coordinator reports"),
        ]

    async def close(self) -> None:
        if self._writer is None:
            return
        self._send(Report(self._readings()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writer.close()
        self._fail_calls()

    async def reserve(self, id: str, limits: Sequence[Limit], amounts: Amounts) -> Decision:
        try:
            answer = await self._call(lambda call: Reserve(call, id, list(limits), amounts))
        except asyncio.CancelledError:
            self.settle(id, limits, amounts, Amounts(requests=0, concurrent=0))  # the reservation will not be used
            raise
        assert isinstance(answer, Decided)
        return answer.decision

    def settle(self, id: str, limits: Sequence[Limit], reserved: Amounts, used: Amounts) -> None:
        self._send(Settle(id, list(limits), reserved, used))

    async def tell_changed(self) -> None:
        """Tenants or keys were changed here; returns when the other workers have refreshed theirs."""
        with contextlib.suppress(Overloaded):  # the supervisor has died, and the workers end with it
            await self._call(Change)

    async def collect(self) -> list[Readings]:
        """The merged readings of all workers."""
        answer = await self._call(lambda call: Collect(call, self._readings()))
        assert isinstance(answer, Collected)
        return answer.readings

    async def seek(self, query: TraceQuery) -> list[Shown]:
        """The timelines of the other workers."""
        answer = await self._call(lambda call: Seek(call, query))
        assert isinstance(answer, Found)
        return answer.traces

    async def recall(self) -> dict[str, ModelHistory]:
        """The load of recent hours, by model."""
        answer = await self._call(Recall)
        assert isinstance(answer, Recalled)
        return answer.models

    async def _call(self, message: Callable[[int], ToCoordinator]) -> Answer:
        call = next(self._numbers)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if self.lost.is_set():
            raise _lost()
        self._calls[call] = future
        try:
            self._send(message(call))
            return await future
        finally:
            del self._calls[call]

    def _send(self, message: ToCoordinator) -> None:
        assert self._writer is not None
        self._writer.write(frame(message))

    async def _read(self, frames: Frames[ToWorker]) -> None:
        try:
            while (message := await frames.next()) is not None:
                match message:
                    case Decided(call) | Collected(call) | Found(call) | Known(call) | Recalled(call):
                        waiting = self._calls.get(call)
                        if waiting is not None and not waiting.done():
                            waiting.set_result(message)
                    case Ask(number):
                        self._send(Report(self._readings(), number))
                    case Sought(number, query):
                        self._send(Told(number, self._traces(query)))
                    case Changed(number):
                        self._changed()
                        self._send(Noted(number))
        except CoordinatorProtocolError as error:
            log.error("protocol error of the worker coordinator: %s", error)
        finally:
            self.lost.set()
            self._fail_calls()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            self._send(Report(self._readings()))

    def _fail_calls(self) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(_lost())


def _lost() -> Overloaded:
    return Overloaded("Limits cannot be checked at the moment; try again.", retry_after=1.0)


class CoordinatedLimits(LimitStore):
    """Limits counted by the coordinator, for all workers of this machine together. See `LimitStore`."""

    def __init__(self, client: CoordinatorClient) -> None:
        self._client = client

    async def reserve(self, id: str, limits: Sequence[Limit], amounts: Amounts) -> Decision:
        return await self._client.reserve(id, limits, amounts)

    async def settle(self, id: str, limits: Sequence[Limit], reserved: Amounts, used: Amounts) -> None:
        self._client.settle(id, limits, reserved, used)
