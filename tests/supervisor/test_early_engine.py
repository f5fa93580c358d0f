"""An engine process that is started before its command is known becomes that engine, and nobody depends on it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

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
        spawn = spawn_first(early)
        child = await spawn(unit, on_line=lines.append, on_status=lambda status: None)
        assert child.alive and isinstance(child, Child)
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

    async def run() -> tuple[list[str], int]:
        given = early.give(command, STATUS_FD)
        assert given is not None
        child = await Child.adopt("engine a", *given, on_line=lambda line: None, on_status=lambda status: None)
        shown: list[str] = []
        while child.alive and "a-model" not in shown:
            shown = _shown(child.pid)
            await asyncio.sleep(0.001)
        return shown, await child.wait()

    (tmp_path / "config").touch()
    shown, code = asyncio.run(run())
    assert [word for word in shown if word][:-1] == command[:-1] and code != 0


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
    monkeypatch.setattr(early_engine.importlib.util, "find_spec", lambda name: None)
    early_engine.begin(["hf:org/name"])
    assert early_engine.begun() is None
    early_engine.dismiss()
