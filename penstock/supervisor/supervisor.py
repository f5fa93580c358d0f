"""`penstock serve`: starts gateways and engines in parallel, keeps them running, and stops them in order.

Invariants: a process that dies after it was ready once is restarted, with backoff, and nothing else is touched. A
process that dies before that ends the whole startup with its reason, unless it is optional: an optional unit is started
on demand, and after a failed start it waits for the next demand. A process whose heartbeats stop is killed and
restarted. No error while a process is started, watched or stopped ends the supervisor. Shutdown goes from the outside
in: the gateways drain first, while the engines still serve them, then the engines stop; a gateway that hangs is not
waited for. A second request to stop kills everything.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from penstock.engine.process import age_s
from penstock.errors import PenstockError
from penstock.supervisor.backoff import Backoff
from penstock.supervisor.child import STATUS_FD, Child, Process
from penstock.supervisor.early_engine import EarlyEngine
from penstock.supervisor.health import is_ready
from penstock.supervisor.heartbeat import HEARTBEAT_S, Heartbeat
from penstock.supervisor.reporter import Reporter
from penstock.supervisor.service_manager import READY, STOPPING, notify
from penstock.supervisor.start_timeline import StartTimeline
from penstock.supervisor.status import Alive, EncoderNeeded, Failed, Listening, Progress, Started, Status
from penstock.supervisor.unit import Unit

ENGINE_GRACE_S = 5.0
"""How long an engine may take to exit after the gateways are gone."""
TICK_S = 0.05
GATEWAY_EXTRA_S = 5.0
"""How much longer than its drain limit a gateway may take to exit."""
HUNG_S = 8.0
"""Silence after which a gateway that should drain is killed: its event loop hangs."""
HEAD_START_S = 3.0
"""The most that a process gains by being started early. If it waited longer for its command, a model was downloaded,
which is no part of what the next replica needs to start."""

log = logging.getLogger("penstock.supervisor")


class Spawn(Protocol):
    """Starts the process of a unit and passes on its output and status messages."""

    async def __call__(
        self, unit: Unit, *, on_line: Callable[[str], None], on_status: Callable[[Status], None]
    ) -> Process: ...


async def spawn_child(unit: Unit, *, on_line: Callable[[str], None], on_status: Callable[[Status], None]) -> Process:
    """As a child of this process."""
    return await Child.spawn(unit.name, unit.command, on_line=on_line, on_status=on_status)


def spawn_first(early: EarlyEngine, engines: Sequence[Unit]) -> Spawn:
    """The same, but the first engine is the process that was started before its command was known. That is dismissed
    where none of the `engines` starts at once, as with models that are scaled up from no replica: it might wait for
    hours."""
    if all(unit.optional for unit in engines):
        early.dismiss()

    async def spawn(unit: Unit, *, on_line: Callable[[str], None], on_status: Callable[[Status], None]) -> Process:
        given = None if unit.optional else early.give(unit.command, STATUS_FD)
        if given is None:
            return await spawn_child(unit, on_line=on_line, on_status=on_status)
        unit.spawned_at = max(early.started_at, time.monotonic() - HEAD_START_S)
        return await Child.adopt(unit.name, *given, on_line=on_line, on_status=on_status)

    return spawn


class StartFailed(PenstockError):
    """A process could not be started."""


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
        drain_delay_s: float = 0.0,
        reporter: Reporter | None = None,
        backoff_s: float = 0.5,
        frozen_s: float = 0.0,
        gateways_up: Callable[[], bool] = lambda: True,
        spawn: Spawn = spawn_child,
        answers: Callable[[], Awaitable[bool]] | None = None,
        engine_grace_s: float = ENGINE_GRACE_S,
    ) -> None:
        """`drain_delay_s`: how long gateways wait before they drain. `frozen_s`: a process without heartbeats for this
        long is killed; 0: never. `gateways_up`: whether all gateways are listening; with several on one port, a
        successful request proves only one. `spawn`: starts processes. `answers`: whether the gateways are ready; by
        default the one at `host` and `port` is asked. `engine_grace_s`: how long engines may take to exit after that;
        longer where gateways on other machines use them."""
        self._engine_grace_s = engine_grace_s
        self._engines = list(engines)
        self._gateways = list(gateways)
        self._gateways_up = gateways_up
        self._spawn = spawn
        self._address = f"{host}:{port}"
        self._answers = answers or (lambda: is_ready(host, port))
        self._drain_s = drain_s
        self._drain_delay_s = drain_delay_s
        self._reporter = reporter or Reporter()
        self._backoff_s = backoff_s
        self._frozen_s = frozen_s
        self._prepared_s = 0.0
        """How old this process was when it began to start others."""
        self.announced = asyncio.Event()
        """Set when everything is ready for the first time."""
        self._stopping = asyncio.Event()
        self._kill_now = asyncio.Event()
        self._tasks: dict[Unit, asyncio.Task[None]] = {}

    @property
    def drain_s(self) -> float:
        """How long a process that drains may take to finish its requests."""
        return self._drain_s

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """Drains and stops; a second call kills everything at once."""
        (self._kill_now if self._stopping.is_set() else self._stopping).set()

    async def run(self, *, handle_signals: bool = True) -> None:
        """Runs until stopped. Raises `StartFailed` when a process never became ready."""
        if handle_signals:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, self.stop)
        started, self._prepared_s = time.monotonic(), age_s()
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
        for task in self._tasks.values():
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def add(self, unit: Unit) -> None:
        """Starts another engine and keeps it running; returns when it is ready, `StartFailed` if it cannot start."""
        unit.added_later = True
        self._engines.append(unit)
        self._start(unit)
        await self._wait_ready(unit)

    async def dismiss(self, unit: Unit) -> None:
        """Drains an engine and stops it for good."""
        unit.dismissed = True
        unit.start_requested.set()
        await self._stop_unit(unit)
        if unit in self._tasks:
            await asyncio.wait([self._tasks[unit]])
        self._forget(unit)

    async def pause(self, unit: Unit) -> None:
        """Drains an engine and stops it; `renew` starts it again."""
        unit.paused = True
        unit.start_requested.clear()
        await self._stop_unit(unit)

    async def renew(self, unit: Unit) -> None:
        """Drains an engine and restarts it; returns when it is ready."""
        unit.paused = False
        unit.problem = None
        await self._stop_unit(unit)
        if unit.dismissed:
            raise StartFailed(f"{unit.name} was removed")
        unit.crashed.clear()
        unit.start_requested.set()
        await self._wait_ready(unit)

    def _start(self, unit: Unit) -> None:
        self._tasks[unit] = task = asyncio.create_task(self._supervise(unit), name=f"keep {unit.name}")
        task.add_done_callback(lambda ended: self._stopping.set() if _failed(ended) else None)

    async def _stop_unit(self, unit: Unit) -> None:
        """Stops the current process of an engine: it drains, and is killed if that takes too long."""
        child = unit.child
        if child is not None and child.alive:
            unit.stop_requested = True
            unit.up.clear()
            await self._end([unit], self._drain_s + ENGINE_GRACE_S)
            while child.alive:  # noqa: ASYNC110 (only `_supervise` waits for the exit)
                await asyncio.sleep(TICK_S)

    async def _wait_ready(self, unit: Unit) -> None:
        """Waits until an engine is ready; `StartFailed` when its process ends instead, or the server is stopped."""
        events = (unit.up, unit.crashed, self._stopping)
        ends = [asyncio.create_task(event.wait(), name=unit.name) for event in events]
        try:
            await asyncio.wait((*ends, self._tasks[unit]), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
        if not unit.up.is_set():
            if unit.dismissed:
                self._forget(unit)
            why = "the server is stopping" if self.stopping else unit.problem or "stopped while starting; see its log"
            raise StartFailed(f"{unit.name}: {why}")

    def _forget(self, unit: Unit) -> None:
        self._tasks.pop(unit, None)
        if unit in self._engines:
            self._engines.remove(unit)

    async def _supervise(self, unit: Unit) -> None:
        backoff = Backoff(self._backoff_s)
        while not self._stopping.is_set() and not unit.dismissed:
            if unit.paused or (unit.optional and not unit.ready.is_set()):
                await self._wait_start_requested(unit)
                if self._stopping.is_set() or unit.dismissed:
                    return
            unit.ready_at = None
            unit.stop_requested = False
            unit.heartbeat = heartbeat = Heartbeat(self._frozen_s)
            try:
                how = await self._run_once(unit, heartbeat)
            except Exception as error:  # the system has no more processes, descriptors or memory
                log.exception("%s could not be started or watched", unit.name)
                how = f"{type(error).__name__}: {error}"
                if unit.child is not None:
                    unit.child.kill()
            unit.up.clear()
            if self._stopping.is_set():
                return
            if unit.stop_requested:
                continue
            unit.crashed.set()
            if not unit.ready.is_set():
                problem = unit.problem or f"stopped while starting ({how}); see its log above"
                if unit.added_later:
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
            unit.start_requested.clear()

    async def _run_once(self, unit: Unit, heartbeat: Heartbeat) -> str:
        """Starts a process and waits for its end; says how it ended."""
        unit.spawned_at = time.monotonic()
        unit.must_answer = False
        unit.child = child = await self._spawn(
            unit,
            on_line=lambda line: self._reporter.line(unit.name, line),
            on_status=lambda status: self._on_status(unit, status),
        )
        if self._stopping.is_set():
            child.kill()  # stopped while it was being started
        frozen, code = await self._wait_exit(child, heartbeat)
        if not frozen:
            return child.describe(code)
        how = f"frozen: no heartbeat for {heartbeat.silent_s:.0f} s"
        log.error("%s was killed: %s", unit.name, how)
        return how

    async def _wait_exit(self, child: Process, heartbeat: Heartbeat) -> tuple[bool, int]:
        """Waits for the exit of a process and kills it if it is frozen. Returns whether it was, and its exit status."""
        waiting = asyncio.create_task(child.wait(), name=f"end of {child.name}")
        frozen = False
        try:
            while not (await asyncio.wait([waiting], timeout=HEARTBEAT_S))[0]:
                if not frozen and heartbeat.look():
                    frozen = True
                    child.kill()
            return frozen, await waiting
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def _wait_start_requested(self, unit: Unit) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (unit.start_requested, self._stopping)]
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
                if unit.heartbeat is not None:
                    unit.heartbeat.beat()
            case Started(info):
                if unit.heartbeat is not None:
                    unit.heartbeat.beat()
                unit.info = info
                unit.ready_at = time.monotonic()
                unit.ready.set()
                unit.up.set()
                self._reporter.engine_started(unit.name, info)
            case Listening():
                unit.ready_at = time.monotonic()
                unit.must_answer = True
            case Failed(message):
                unit.problem = message
            case EncoderNeeded(name):
                for encoder in self._engines:
                    if encoder.optional and encoder.name == f"encoder {name}":
                        encoder.start_requested.set()

    async def _announce(self, started: float) -> None:
        """Waits until all engines and gateways are ready, and reports it."""
        needed = [unit for unit in self._engines if not unit.optional]
        for unit in needed:
            await unit.ready.wait()
        pause = 0.02
        # A machine that only runs engines for others has no gateway that could answer.
        while self._gateways and not (self._gateways_up() and await self._answers()):
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.5)
        for unit in self._gateways:
            unit.ready.set()
            unit.ready_at = unit.ready_at or time.monotonic()
        infos = [unit.info for unit in needed if unit.info is not None]
        now = time.monotonic()
        timeline = StartTimeline.of([*self._gateways, *needed], started, self._prepared_s, now)
        self._reporter.timeline(timeline)
        self._reporter.ready(infos, timeline.ready_s)  # since the command was given, as the timeline says
        notify(READY, f"serving on {self._address}" if self._gateways else "running engines")
        self.announced.set()
        for unit in self._engines:
            if unit.autostart:
                unit.start_requested.set()

    async def _shut_down(self) -> None:
        ready = all(unit.ready.is_set() for unit in self._gateways)
        notify(STOPPING, "finishing running requests" if ready else "")
        if ready:
            self._reporter.draining(self._drain_s)
        # A gateway that was never ready has no requests to drain.
        grace = self._drain_delay_s + self._drain_s + GATEWAY_EXTRA_S if ready else 2.0
        await self._end(self._gateways, grace)
        await self._end(self._engines, self._engine_grace_s if ready else 0.5)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _end(self, units: list[Unit], grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`, and what they may take to save, or a second request to stop."""
        running = [(unit, unit.child) for unit in units if unit.child is not None and unit.child.alive]
        for _, child in running:
            child.terminate()
        deadline = time.monotonic() + grace_s + max((unit.save_s for unit, _ in running), default=0.0)
        while any(child.alive for _, child in running):
            left = deadline - time.monotonic()
            if left <= 0 or self._kill_now.is_set():
                break
            for unit, child in running:
                if unit.must_answer and unit.heartbeat is not None and unit.heartbeat.silent_s > HUNG_S and child.alive:
                    log.error("%s hangs and is killed", unit.name)
                    child.kill()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._kill_now.wait(), min(left, TICK_S))
        for _, child in running:
            child.kill()


def _failed(task: asyncio.Task[None]) -> bool:
    return not task.cancelled() and task.exception() is not None
