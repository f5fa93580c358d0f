"""An engine process that is started before its command is known becomes that engine, and nobody depends on it."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from penstock.cli import serve_ray
from penstock.cli.serve import serve
from penstock.interpreter import module
from penstock.supervisor import early_engine
from penstock.supervisor.child import STATUS_FD, Child
from penstock.supervisor.early_engine import EarlyEngine
from penstock.supervisor.supervisor import spawn_first
from penstock.supervisor.unit import Unit


def test_it_runs_the_command_that_it_is_given(tmp_path: Path) -> None:
    lines: list[str] = []
    early = EarlyEngine()
    unit = Unit("engine a", module("penstock", "engine", "--make-curve-key", str(tmp_path / "key")))

    async def run() -> int:
        spawn = spawn_first(early, [unit])
        child = await spawn(unit, on_line=lines.append, on_status=lambda status: None)
        assert isinstance(child, Child)
        code = await child.wait()
        assert not child.alive and child.describe(code) == "exit code 0"
        # The next one is started as always.
        more = Unit("engine b", module("penstock", "engine", "--make-curve-key", str(tmp_path / "key b")))
        return code + await (await spawn(more, on_line=lines.append, on_status=lambda status: None)).wait()

    assert asyncio.run(run()) == 0
    assert len(lines) == 2 and (tmp_path / "key").exists() and (tmp_path / "key b").exists()
    early.dismiss()


def test_the_system_shows_its_command_line(tmp_path: Path) -> None:
    early = EarlyEngine()
    command = module("penstock", "engine", "a-model", "--resolved", str(tmp_path / "config"), "--supervised", STATUS_FD)

    async def run() -> list[str]:
        given = early.give(command, STATUS_FD)
        assert given is not None
        child = await Child.adopt("engine a", *given, on_line=lambda line: None, on_status=lambda status: None)
        shown: list[str] = []
        while child.alive and "a-model" not in shown:
            shown = _shown(child.pid)
            await asyncio.sleep(0.001)
        child.kill()
        await child.wait()
        return shown

    os.mkfifo(tmp_path / "config")  # nobody writes to it: the engine waits for its configuration
    assert [word for word in asyncio.run(run()) if word][:-1] == command[:-1]


def _shown(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def test_it_is_not_used_for_others_nor_once_it_is_dead() -> None:
    early = EarlyEngine()
    assert early.give(module("penstock", "gateway"), STATUS_FD) is None
    os.kill(early.pid, 9)
    os.waitid(os.P_PID, early.pid, os.WEXITED | os.WNOWAIT)
    assert early.give(module("penstock", "engine", "a-model"), STATUS_FD) is None
    early.dismiss()
    early.dismiss()


def test_no_process_is_started_where_it_would_be_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_engine, "EarlyEngine", lambda: pytest.fail("started"))
    early_engine.begin(["--help"])
    early_engine.begin(["--cluster", "ray"])
    early_engine.begin(["--cluster=ray"])
    monkeypatch.setattr(early_engine.importlib.util, "find_spec", lambda name: None)
    early_engine.begin(["hf:org/name"])
    assert early_engine.begun() is None
    early_engine.dismiss()


def test_its_end_is_noticed_where_the_system_does_not_say_when(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(pid: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", forbidden)
    early = EarlyEngine()

    async def run() -> int:
        given = early.give(module("penstock", "engine", "a-model"), STATUS_FD)
        assert given is not None
        child = await Child.adopt("engine a", *given, on_line=lambda line: None, on_status=lambda status: None)
        ended = asyncio.create_task(child.wait())
        await asyncio.sleep(0.01)  # the event loop still runs
        child.kill()
        return await asyncio.wait_for(ended, 60)

    assert asyncio.run(run()) == -9


def test_it_does_not_wait_where_no_engine_starts_at_once() -> None:
    early = EarlyEngine()
    spawn_first(early, [Unit("encoder a", module("penstock", "engine", "a"), optional=True)])
    assert not Path(f"/proc/{early.pid}").exists()


def test_the_time_it_waited_for_a_download_is_not_counted_as_a_cold_start() -> None:
    early = EarlyEngine()
    early.started_at = time.monotonic() - 600
    unit = Unit("engine a", module("penstock", "engine", "--check", "-e", "ipc:///nowhere"))

    async def run() -> None:
        spawned = await spawn_first(early, [unit])(unit, on_line=lambda line: None, on_status=lambda status: None)
        assert isinstance(spawned, Child) and spawned.pid == early.pid
        spawned.kill()
        await spawned.wait()

    asyncio.run(run())
    assert 0 < time.monotonic() - unit.spawned_at < 300


def test_a_server_on_a_cluster_does_not_keep_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    early = EarlyEngine()
    monkeypatch.setattr(early_engine, "_early", early)
    served: list[bool] = []
    monkeypatch.setattr(
        serve_ray, "serve_ray", lambda config, detach: served.append(Path(f"/proc/{early.pid}").exists())
    )
    serve(settings=["cluster.kind=ray"])
    assert served == [False]
