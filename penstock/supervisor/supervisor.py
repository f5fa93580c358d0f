"""`penstock serve`: starts gateways and an engine per model at the same time, keeps them running, stops them in order.

Invariants: whatever dies after it was once ready is started again, with backoff, and nothing else is touched; what dies
before that ends the whole start with its reason, unless it is optional: such a unit is started when it is asked for,
and when it cannot be, it waits to be asked again. An engine that was ready and gives no sign of life any more is
killed, so that it is started again. Stopping goes from the outside in: the gateways drain first, while their engines
still work for them, then the engines leave. A second request to stop kills everything.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from penstock.errors import PenstockError
from penstock.supervisor.backoff import Backoff
from penstock.supervisor.child import Child, describe_exit
from penstock.supervisor.health import is_ready
from penstock.supervisor.heartbeat import HEARTBEAT_S, Heartbeat
from penstock.supervisor.reporter import Reporter
from penstock.supervisor.status import Alive, EncoderNeeded, Failed, Listening, Progress, Started, Status
from penstock.supervisor.unit import Unit

ENGINE_GRACE_S = 5.0
"""How long an engine without gateways may take to leave."""
TICK_S = 0.05
GATEWAY_EXTRA_S = 5.0
"""What a gateway may take beyond its own limit for draining."""


class StartFailed(PenstockError):
    """Something could not be started."""


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
        frozen_s: float = 0.0,
        gateways_up: Callable[[], bool] = lambda: True,
    ) -> None:
        """`frozen_s`: an engine that gives no sign of life for so long is killed; 0: never. `gateways_up`: whether all
        gateways listen, for several on one port, where an answer proves one of them."""
        self._engines = list(engines)
        self._gateways = list(gateways)
        self._gateways_up = gateways_up
        self._host = host
        self._port = port
        self._drain_s = drain_s
        self._reporter = reporter or Reporter()
        self._backoff_s = backoff_s
        self._frozen_s = frozen_s
        self.announced = asyncio.Event()
        """Set when everything has been up for the first time."""
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._keepers: dict[Unit, asyncio.Task[None]] = {}

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
        for unit in [*self._engines, *self._gateways]:
            self._start(unit)
        announcer = asyncio.create_task(self._announce(started), name="announce")
        try:
            await self._stopping.wait()
        finally:
            self._stopping.set()
            announcer.cancel()
            await asyncio.gather(announcer, return_exceptions=True)
            await self._shut_down()
            self._reporter.stopped()
        for keeper in self._keepers.values():
            if not keeper.cancelled() and (error := keeper.exception()) is not None:
                raise error

    async def add(self, unit: Unit) -> None:
        """Keep one more engine running; returns when it is ready. `StartFailed` when it does not become so."""
        unit.late = True
        self._engines.append(unit)
        self._start(unit)
        await self._until_up(unit)

    async def dismiss(self, unit: Unit) -> None:
        """Let an engine finish what it runs and end, for good."""
        unit.dismissed = True
        unit.asked.set()
        await self._send_off(unit)
        await asyncio.wait([self._keepers[unit]])
        self._forget(unit)

    async def pause(self, unit: Unit) -> None:
        """Let an engine finish what it runs and end; `renew` brings it back."""
        unit.paused = True
        unit.asked.clear()
        await self._send_off(unit)

    async def renew(self, unit: Unit) -> None:
        """Let an engine finish what it runs, and start it again; returns when it is ready."""
        unit.paused = False
        unit.problem = None
        await self._send_off(unit)
        unit.fell.clear()
        unit.asked.set()
        await self._until_up(unit)

    def _start(self, unit: Unit) -> None:
        self._keepers[unit] = task = asyncio.create_task(self._keep(unit), name=f"keep {unit.name}")
        task.add_done_callback(lambda ended: self._stopping.set() if _failed(ended) else None)

    async def _send_off(self, unit: Unit) -> None:
        """End the present process of an engine: it drains by itself, and is killed when that takes too long."""
        child = unit.child
        if child is not None and child.alive:
            unit.told = True
            unit.up.clear()
            await self._end([unit], self._drain_s + ENGINE_GRACE_S)
            while child.alive:  # noqa: ASYNC110 (the keeper alone waits for it)
                await asyncio.sleep(TICK_S)

    async def _until_up(self, unit: Unit) -> None:
        """Until the process of an engine is ready; `StartFailed` when it ends instead."""
        ends = [asyncio.create_task(event.wait(), name=unit.name) for event in (unit.up, unit.fell)]
        try:
            await asyncio.wait((*ends, self._keepers[unit]), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
        if not unit.up.is_set():
            if unit.dismissed:
                self._forget(unit)
            raise StartFailed(f"{unit.name}: {unit.problem or 'stopped while starting; see its log'}")

    def _forget(self, unit: Unit) -> None:
        self._keepers.pop(unit, None)
        self._engines.remove(unit)

    async def _keep(self, unit: Unit) -> None:
        backoff = Backoff(self._backoff_s)
        while not self._stopping.is_set() and not unit.dismissed:
            if unit.paused or (unit.optional and not unit.ready.is_set()):
                await self._until_asked(unit)
                if self._stopping.is_set() or unit.dismissed:
                    return
            unit.ready_at = None
            unit.told = False
            unit.pulse = pulse = Heartbeat(self._frozen_s)
            unit.child = await Child.spawn(
                unit.name,
                unit.command,
                on_line=lambda line: self._reporter.line(unit.name, line),
                on_status=lambda status: self._on_status(unit, status),
            )
            if self._stopping.is_set():
                unit.child.kill()  # stopped while it was being started
            frozen, code = await self._end_of(unit.child, pulse)
            unit.up.clear()
            if self._stopping.is_set():
                return
            if unit.told:
                continue
            unit.fell.set()
            how = f"frozen: no sign of life for {pulse.silent_s:.0f} s" if frozen else describe_exit(code)
            if not unit.ready.is_set():
                problem = unit.problem or f"stopped while starting ({how}); see its log above"
                if unit.late:
                    unit.problem, unit.dismissed = problem, True
                    return
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

    async def _end_of(self, child: Child, pulse: Heartbeat) -> tuple[bool, int]:
        """Waits for a process to end, and kills it when it is frozen: whether it was, and its exit status."""
        waiting = asyncio.create_task(child.wait(), name=f"end of {child.name}")
        frozen = False
        try:
            while not (await asyncio.wait([waiting], timeout=HEARTBEAT_S))[0]:
                if not frozen and pulse.look():
                    frozen = True
                    child.kill()
            return frozen, await waiting
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

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
                if unit.on_progress is not None:
                    unit.on_progress(phase, fraction)
            case Alive():
                if unit.pulse is not None:
                    unit.pulse.beat()
            case Started(info):
                if unit.pulse is not None:
                    unit.pulse.beat()
                unit.info = info
                unit.ready_at = time.monotonic()
                unit.ready.set()
                unit.up.set()
                self._reporter.engine_started(unit.name, info)
            case Listening():
                unit.ready_at = time.monotonic()
            case Failed(message):
                unit.problem = message
            case EncoderNeeded(name):
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
        self.announced.set()
        for unit in self._engines:
            if unit.early:
                unit.asked.set()

    async def _shut_down(self) -> None:
        ready = all(unit.ready.is_set() for unit in self._gateways)
        if ready:
            self._reporter.draining(self._drain_s)
        # Before it was ready a gateway has nobody to drain.
        grace = self._drain_s + GATEWAY_EXTRA_S if ready else 2.0
        await self._end(self._gateways, grace)
        await self._end(self._engines, ENGINE_GRACE_S if ready else 0.5)
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)

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
                await asyncio.wait_for(self._hurry.wait(), min(left, TICK_S))
        for child in children:
            child.kill()


def _failed(task: asyncio.Task[None]) -> bool:
    return not task.cancelled() and task.exception() is not None
