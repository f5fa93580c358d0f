"""`penstock serve`: starts gateways and an engine per model at the same time, keeps them running, stops them in order.

Invariants: whatever dies after it was once ready is started again, with backoff, and nothing else is touched; what dies
before that ends the whole start with its reason, unless it is optional: such a unit is started when it is asked for,
and when it cannot be, it waits to be asked again. Stopping goes from the outside in: the gateways drain first, while
their engines still work for them, then the engines leave. A second request to stop kills everything.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from penstock.engine.request import EngineInfo
from penstock.errors import PenstockError
from penstock.supervisor.backoff import Backoff
from penstock.supervisor.child import Child, describe_exit
from penstock.supervisor.health import is_ready
from penstock.supervisor.lifeline import Asked, Failed, Listening, Progress, Started, Status
from penstock.supervisor.reporter import Reporter

ENGINE_GRACE_S = 5.0
"""How long an engine without gateways may take to leave."""
GATEWAY_EXTRA_S = 5.0
"""What a gateway may take beyond its own limit for draining."""


class StartFailed(PenstockError):
    """Something could not be started."""


@dataclass(slots=True, eq=False)
class Unit:
    """A process that should always be running."""

    name: str
    command: Sequence[str]
    optional: bool = False
    """Started when somebody asks for it; the rest can do without."""
    early: bool = False
    """An optional one that is started without being asked, once the others are ready."""
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    child: Child | None = None
    info: EngineInfo | None = None
    problem: str | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it has been ready for the first time."""
    ready_at: float | None = None
    """When the present process became ready."""


class Supervisor:
    """One run of the process tree; `run` returns when it has stopped."""

    def __init__(
        self,
        *,
        engines: Sequence[Unit],
        gateways: Sequence[Unit],
        host: str,
        port: int,
        drain_s: float,
        reporter: Reporter | None = None,
        backoff_s: float = 0.5,
        gateways_up: Callable[[], bool] = lambda: True,
    ) -> None:
        """`gateways_up`: whether all gateways listen, for several on one port, where an answer proves one of them."""
        self._engines = list(engines)
        self._gateways = list(gateways)
        self._gateways_up = gateways_up
        self._host = host
        self._port = port
        self._drain_s = drain_s
        self._reporter = reporter or Reporter()
        self._backoff_s = backoff_s
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()

    def stop(self) -> None:
        """Drain and stop; called again, stop at once."""
        (self._hurry if self._stopping.is_set() else self._stopping).set()

    async def run(self, *, handle_signals: bool = True) -> None:
        """Until stopped. Raises `StartFailed` when something never became ready."""
        if handle_signals:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, self.stop)
        started = time.monotonic()
        units = [*self._engines, *self._gateways]
        keepers = [asyncio.create_task(self._keep(unit), name=f"keep {unit.name}") for unit in units]
        announcer = asyncio.create_task(self._announce(started), name="announce")
        stop = asyncio.create_task(self._stopping.wait(), name="stop")
        try:
            # A keeper ends early only by failing; the announcer just ends.
            watched = {*keepers, stop}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stopping.set()
            announcer.cancel()
            await asyncio.gather(announcer, return_exceptions=True)
            await self._shut_down(keepers)
            stop.cancel()
            await asyncio.gather(stop, return_exceptions=True)
            self._reporter.stopped()
        for keeper in keepers:
            if not keeper.cancelled() and (error := keeper.exception()) is not None:
                raise error

    async def _keep(self, unit: Unit) -> None:
        backoff = Backoff(self._backoff_s)
        while not self._stopping.is_set():
            if unit.optional and not unit.ready.is_set():
                await self._until_asked(unit)
                if self._stopping.is_set():
                    return
            unit.ready_at = None
            unit.child = await Child.spawn(
                unit.name,
                unit.command,
                on_line=lambda line: self._reporter.line(unit.name, line),
                on_status=lambda status: self._on_status(unit, status),
            )
            if self._stopping.is_set():
                unit.child.kill()  # stopped while it was being started
            code = await unit.child.wait()
            if self._stopping.is_set():
                return
            how = describe_exit(code)
            if not unit.ready.is_set():
                problem = unit.problem or f"stopped while starting ({how}); see its log above"
                if not unit.optional:
                    raise StartFailed(f"{unit.name}: {problem}")
                self._reporter.line(unit.name, f"not started: {problem}")
            ready_s = 0.0 if unit.ready_at is None else time.monotonic() - unit.ready_at
            delay = backoff.delay(ready_s)
            if unit.ready.is_set():
                self._reporter.exited(unit.name, how, delay)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
            unit.asked.clear()

    async def _until_asked(self, unit: Unit) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (unit.asked, self._stopping)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    def _on_status(self, unit: Unit, status: Status) -> None:
        match status:
            case Progress(phase, fraction):
                self._reporter.progress(unit.name, phase, fraction)
            case Started(info):
                unit.info = info
                unit.ready_at = time.monotonic()
                unit.ready.set()
                self._reporter.engine_started(unit.name, info)
            case Listening():
                unit.ready_at = time.monotonic()
            case Failed(message):
                unit.problem = message
            case Asked(name):
                for encoder in self._engines:
                    if encoder.optional and encoder.name == f"encoder {name}":
                        encoder.asked.set()

    async def _announce(self, started: float) -> None:
        """Wait until every engine and the gateways answer, and say so."""
        needed = [unit for unit in self._engines if not unit.optional]
        for unit in needed:
            await unit.ready.wait()
        pause = 0.02
        while not (self._gateways_up() and await is_ready(self._host, self._port)):
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.5)
        for unit in self._gateways:
            unit.ready.set()
            unit.ready_at = unit.ready_at or time.monotonic()
        infos = [unit.info for unit in needed if unit.info is not None]
        self._reporter.ready(infos, time.monotonic() - started)
        for unit in self._engines:
            if unit.early:
                unit.asked.set()

    async def _shut_down(self, keepers: list[asyncio.Task[None]]) -> None:
        ready = all(unit.ready.is_set() for unit in self._gateways)
        if ready:
            self._reporter.draining(self._drain_s)
        # Before it was ready a gateway has nobody to drain.
        grace = self._drain_s + GATEWAY_EXTRA_S if ready else 2.0
        await self._end(self._gateways, grace)
        await self._end(self._engines, ENGINE_GRACE_S if ready else 0.5)
        await asyncio.gather(*keepers, return_exceptions=True)

    async def _end(self, units: list[Unit], grace_s: float) -> None:
        """SIGTERM, wait up to `grace_s` or until hurried, SIGKILL."""
        children = [unit.child for unit in units if unit.child is not None and unit.child.alive]
        for child in children:
            child.terminate()
        deadline = time.monotonic() + grace_s
        while any(child.alive for child in children):
            left = deadline - time.monotonic()
            if left <= 0 or self._hurry.is_set():
                break
            with suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), min(left, 0.05))
        for child in children:
            child.kill()
