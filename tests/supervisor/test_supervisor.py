"""R-OPS-1, R-OPS-2: the process tree starts together, heals itself, drains in order and leaves no process behind."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from penstock.engine.request import EngineInfo
from penstock.supervisor.child import STATUS_FD
from penstock.supervisor.health import is_ready
from penstock.supervisor.reporter import Reporter
from penstock.supervisor.start_timeline import StartTimeline
from penstock.supervisor.status import EncoderNeeded
from penstock.supervisor.supervisor import StartFailed, Supervisor
from penstock.supervisor.unit import Unit
from tests.engine_host.client import connected, eventually
from tests.ports import free_port


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ps-") as name:
        yield Path(name)


class Recorder(Reporter):
    """Remembers every event."""

    def __init__(self) -> None:
        self.events: list[tuple[str, ...]] = []
        self.lines: list[str] = []
        self.start: StartTimeline | None = None

    def line(self, child: str, text: str) -> None:
        self.lines.append(f"{child}: {text}")

    def progress(self, child: str, phase: str, fraction: float) -> None:
        self.events.append(("progress", child, phase))

    def engine_started(self, child: str, info: EngineInfo) -> None:
        self.events.append(("started", child, info.instance))

    def timeline(self, timeline: StartTimeline) -> None:
        self.start = timeline

    def ready(self, engines: list[EngineInfo], seconds: float) -> None:
        self.events.append(("ready", *(info.model for info in engines)))

    def exited(self, child: str, how: str, restart_in_s: float) -> None:
        self.events.append(("exited", child, how, f"{restart_in_s:g}"))

    def draining(self, limit_s: float) -> None:
        self.events.append(("draining", f"{limit_s:g}"))

    def count(self, kind: str) -> int:
        return sum(event[0] == kind for event in self.events)


def tree(folder: Path, port: int, *, engine: str = "good", gateway: str = "good") -> tuple[Unit, Unit]:
    run = [sys.executable, "-m", "tests.supervisor.fakes"]
    return (
        Unit("engine", [*run, "engine", f"ipc://{folder}/engine", STATUS_FD, engine]),
        Unit("gateway", [*run, "gateway", str(port), gateway, f"{folder}/drained", STATUS_FD]),
    )


@asynccontextmanager
async def supervised(
    folder: Path, *, engine: str = "good", gateway: str = "good", drain_s: float = 60.0, frozen_s: float = 0.0
) -> AsyncIterator[tuple[Supervisor, Recorder, Unit, Unit]]:
    port = free_port()
    engine_unit, gateway_unit = tree(folder, port, engine=engine, gateway=gateway)
    recorder = Recorder()
    supervisor = Supervisor(
        engines=[engine_unit],
        gateways=[gateway_unit],
        host="127.0.0.1",
        port=port,
        drain_s=drain_s,
        reporter=recorder,
        backoff_s=0.05,
        frozen_s=frozen_s,
    )
    running = asyncio.create_task(supervisor.run(handle_signals=False))
    try:
        await until(lambda: recorder.count("ready") == 1 or running.done())
        yield supervisor, recorder, engine_unit, gateway_unit
    finally:
        supervisor.stop()
        await asyncio.wait_for(running, 150)


async def until(condition: Callable[[], bool], timeout_s: float = 150.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)


async def until_ready(unit: Unit) -> None:
    for _ in range(3000):
        if await is_ready("127.0.0.1", int(unit.command[4])):
            return
        await asyncio.sleep(0.05)
    pytest.fail("the gateway does not answer")


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


async def test_everything_starts_reports_progress_and_is_announced_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)  # as systemd listens to a service of Type=notify
    manager.bind(str(folder / "notify"))
    manager.setblocking(False)
    monkeypatch.setenv("NOTIFY_SOCKET", str(folder / "notify"))
    async with supervised(folder) as (supervisor, recorder, engine, gateway):
        told = manager.recv(4096).decode()
        assert told.splitlines()[0] == "READY=1" and supervisor._address in told
        assert recorder.events[0] == ("progress", "engine", "weights")
        assert recorder.events[-1] == ("ready", "scripted")
        await until(lambda: "engine: engine loading" in recorder.lines)
        start = recorder.start
        assert start is not None and [child.name for child in start.children] == ["gateway", "engine"]
        for child in start.children:
            assert 0.0 < start.prepared_s <= child.spawned_s <= child.ready_s <= start.ready_s
        assert start.children[1].phases and "engine after" in str(start)
        assert engine.child is not None and gateway.child is not None
        pids = [engine.child.pid, gateway.child.pid]
    assert manager.recv(4096).decode().splitlines()[0] == "STOPPING=1"
    with pytest.raises(BlockingIOError):
        manager.recv(4096)  # children have told their supervisor, and nobody else
    manager.close()
    assert not any(alive(pid) for pid in pids)
    assert (folder / "drained").read_text() == "drained"
    assert not (folder / "engine").exists()


async def test_a_killed_engine_comes_back_and_the_gateway_is_not_touched(folder: Path) -> None:
    async with supervised(folder) as (_, recorder, engine, gateway):
        assert engine.child is not None and gateway.child is not None
        before = gateway.child.pid
        os.kill(engine.child.pid, signal.SIGKILL)
        await until(lambda: recorder.count("started") == 2)
        assert ("exited", "engine", "killed by SIGKILL", "0.05") in recorder.events
        assert gateway.child.pid == before and alive(before)
        with connected(f"ipc://{folder}/engine") as client:
            assert (await asyncio.to_thread(client.hello)).info.instance == str(engine.child.pid)


async def test_a_killed_gateway_comes_back_and_the_engine_is_not_touched(folder: Path) -> None:
    async with supervised(folder) as (_, recorder, engine, gateway):
        assert engine.child is not None and gateway.child is not None
        before, dead = engine.child.pid, gateway.child.pid
        os.kill(dead, signal.SIGKILL)
        await until(lambda: gateway.child is not None and gateway.child.pid != dead)
        assert engine.child.pid == before and alive(before)
        assert recorder.count("exited") == 1
        await until_ready(gateway)


async def test_an_engine_that_keeps_dying_is_restarted_ever_more_slowly(folder: Path) -> None:
    async with supervised(folder) as (_, recorder, engine, _gateway):
        for round_number in range(1, 4):
            await until(lambda n=round_number: recorder.count("started") == n)  # type: ignore[misc]
            assert engine.child is not None
            os.kill(engine.child.pid, signal.SIGKILL)
            await until(lambda n=round_number: recorder.count("exited") == n)  # type: ignore[misc]
        delays = [event[3] for event in recorder.events if event[0] == "exited"]
        assert delays == ["0.05", "0.1", "0.2"]


@pytest.mark.parametrize(("mode", "message"), [("broken", "engine: no such model"), ("crashing", "exit code 9")])
async def test_an_engine_that_never_starts_ends_the_start_with_its_reason(
    folder: Path, mode: str, message: str
) -> None:
    engine, gateway = tree(folder, port := free_port(), engine=mode)
    supervisor = Supervisor(engines=[engine], gateways=[gateway], host="127.0.0.1", port=port, drain_s=5)
    with pytest.raises(StartFailed, match=message):
        await asyncio.wait_for(supervisor.run(handle_signals=False), 150)
    assert gateway.child is not None and not alive(gateway.child.pid)


async def test_an_optional_engine_is_started_when_it_is_asked_for(folder: Path) -> None:
    port = free_port()
    needed, gateway = tree(folder, port)
    run = [sys.executable, "-m", "tests.supervisor.fakes", "engine"]
    wanted = Unit("encoder a", [*run, f"ipc://{folder}/a", STATUS_FD, "good"], optional=True)
    broken = Unit("encoder b", [*run, f"ipc://{folder}/b", STATUS_FD, "broken"], optional=True)
    recorder = Recorder()
    supervisor = Supervisor(
        engines=[needed, wanted, broken], gateways=[gateway], host="127.0.0.1", port=port, drain_s=5, reporter=recorder,
        backoff_s=0.05,
    )  # fmt: skip
    running = asyncio.create_task(supervisor.run(handle_signals=False))
    try:
        await until(lambda: recorder.count("ready") == 1)
        assert wanted.child is None and broken.child is None
        supervisor._on_status(gateway, EncoderNeeded("a"))
        supervisor._on_status(gateway, EncoderNeeded("b"))
        await until(lambda: wanted.ready.is_set() and any("no such model" in line for line in recorder.lines))
        os.kill(wanted.child.pid, signal.SIGKILL)  # type: ignore[union-attr]
        await until(lambda: sum(event[:2] == ("started", "encoder a") for event in recorder.events) == 2)
        assert sum(event[:2] == ("progress", "encoder b") for event in recorder.events) == 1
        assert not running.done()
    finally:
        supervisor.stop()
        await asyncio.wait_for(running, 150)


async def test_a_frozen_engine_is_killed_and_started_again(folder: Path) -> None:
    async with supervised(folder, frozen_s=3600.0) as (_, recorder, engine, gateway):
        assert engine.child is not None and gateway.child is not None and engine.heartbeat is not None
        frozen, untouched = engine.child.pid, gateway.child.pid
        os.kill(frozen, signal.SIGSTOP)
        engine.heartbeat._limit_s = 2.0  # of this one only: the next may be slow
        await until(lambda: recorder.count("started") >= 2)
        assert not alive(frozen) and engine.child.pid != frozen and gateway.child.pid == untouched
        assert any("no heartbeat" in event[2] for event in recorder.events if event[0] == "exited")


@pytest.mark.slow
async def test_an_engine_that_loads_for_long_is_not_frozen(folder: Path) -> None:
    async with supervised(folder, engine="slow", frozen_s=1.0) as (_, recorder, _, _):
        assert recorder.count("started") == 1 and recorder.count("exited") == 0


async def test_the_gateway_drains_before_the_engine_is_told_to_leave(folder: Path) -> None:
    async with supervised(folder) as (supervisor, recorder, engine, gateway):
        assert engine.child is not None and gateway.child is not None
        supervisor.stop()
        while gateway.child.alive:
            assert engine.child.alive, "the engine left before the gateway had drained"
            await asyncio.sleep(0.01)
        await until(lambda: not engine.child.alive)  # type: ignore[union-attr]
        assert ("draining", "60") in recorder.events


async def test_a_second_stop_does_not_wait(folder: Path) -> None:
    async with supervised(folder, gateway="stubborn", drain_s=3600) as (supervisor, _, engine, gateway):
        assert engine.child is not None and gateway.child is not None
        supervisor.stop()
        await asyncio.sleep(0.3)
        assert gateway.child.alive
        supervisor.stop()
        await until(lambda: not gateway.child.alive and not engine.child.alive)  # type: ignore[union-attr]


async def test_a_gateway_that_will_not_drain_is_cut_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.supervisor.supervisor.GATEWAY_EXTRA_S", 0.2)
    async with supervised(folder, gateway="stubborn", drain_s=0.2) as (supervisor, _, _engine, gateway):
        supervisor.stop()
        await until(lambda: gateway.child is not None and not gateway.child.alive)


SUPERVISOR = """
    import asyncio, sys
    from pathlib import Path
    from penstock.supervisor.supervisor import Supervisor
    from penstock.supervisor.reporter import Reporter
    from tests.supervisor.test_supervisor import tree

    class Printer(Reporter):
        def ready(self, engines, seconds):
            print("ready", engine.child.pid, gateway.child.pid, flush=True)

    async def main():
        global engine, gateway
        port = int(sys.argv[2])
        engine, gateway = tree(Path(sys.argv[1]), port)
        await Supervisor(
            engines=[engine], gateways=[gateway], host="127.0.0.1", port=port, drain_s=5, reporter=Printer()
        ).run()

    asyncio.run(main())
"""


@contextmanager
def real_supervisor(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A supervisor in a process of its own, once it is ready; and the ids of its children."""
    command = [sys.executable, "-c", textwrap.dedent(SUPERVISOR), str(folder), str(free_port())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            word, *numbers = process.stdout.readline().split()
            assert word == "ready"
            yield process, [int(number) for number in numbers]
        finally:
            process.kill()


@pytest.mark.parametrize("stopped_engine", [False, True], ids=["running", "engine frozen"])
def test_no_orphan_survives_the_death_of_the_supervisor(folder: Path, stopped_engine: bool) -> None:
    if stopped_engine and sys.platform != "linux":
        pytest.skip("only the Linux kernel ends a stopped child")
    with real_supervisor(folder) as (process, pids):
        if stopped_engine:
            os.kill(pids[0], signal.SIGSTOP)
        os.kill(process.pid, signal.SIGKILL)
        assert eventually(lambda: not any(alive(pid) for pid in pids))


def test_a_signal_drains_the_tree(folder: Path) -> None:
    with real_supervisor(folder) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(150) == 0
        assert (folder / "drained").exists()


async def test_a_process_that_cannot_be_spawned_fails_alone(folder: Path) -> None:
    async with supervised(folder) as (supervisor, _, engine, _gateway):
        with pytest.raises(StartFailed, match="FileNotFoundError"):
            await supervisor.add(Unit("engine two", ["/nowhere/at/all"]))
        assert not supervisor.stopping and engine.child is not None and engine.child.alive


@pytest.mark.slow
async def test_a_hung_gateway_is_killed_and_started_again_and_does_not_delay_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.supervisor.supervisor.HUNG_S", 1.0)
    async with supervised(folder, gateway="beating", frozen_s=2.0, drain_s=60.0) as (_, recorder, _engine, gateway):
        assert gateway.child is not None
        first, hang = gateway.child, (folder / "drained.hang").touch
        hang()  # its event loop hangs
        await until(lambda: not first.alive)
        await until(lambda: gateway.child is not first and gateway.child is not None)
        assert any(event[0] == "exited" and "frozen" in event[2] for event in recorder.events)
        await until_ready(gateway)
        hang()
        await asyncio.sleep(1.5)
        begun = time.monotonic()
    assert time.monotonic() - begun < 20, "drain_s is a minute"


class SlowEnd:
    """A process that takes a moment to end when it is told to."""

    name = "engine"

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends = float("inf")
        self.killed = False

    @property
    def alive(self) -> bool:
        return not self.killed and time.monotonic() < self._ends

    def terminate(self) -> None:
        self._ends = time.monotonic() + self._seconds

    def kill(self) -> None:
        self.killed = self.alive


@pytest.mark.parametrize(("save_s", "ends_s", "killed"), [(0.0, 3600.0, True), (60.0, 0.3, False)])
async def test_an_engine_may_save_what_outlives_it(save_s: float, ends_s: float, killed: bool) -> None:
    """Also one that was added later, whatever the others may."""
    unit = Unit("engine", [], save_s=save_s, child=SlowEnd(ends_s))  # type: ignore[arg-type]
    supervisor = Supervisor(engines=[], gateways=[], host="", port=0, drain_s=0.0)
    await supervisor._end([unit], 0.05)
    assert isinstance(unit.child, SlowEnd) and unit.child.killed is killed
