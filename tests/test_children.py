"""Signals to child processes: how a process ended is reported as it was, also when it is killed right then."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from penstock import children
from penstock.supervisor.child import Child


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The event loop learns that a process has ended only once this is set."""
    may, wait = threading.Event(), os.waitpid

    def waitpid(pid: int, options: int) -> tuple[int, int]:
        assert may.wait(120)
        return wait(pid, options)

    monkeypatch.setattr(os, "waitpid", waitpid)
    return may


def end(pid: int) -> None:
    os.kill(pid, signal.SIGPROF)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


async def test_a_process_that_ended_by_itself_is_not_taken_for_a_killed_one(later: threading.Event) -> None:
    process = await asyncio.create_subprocess_exec("sleep", "1000")
    end(process.pid)
    children.kill(process)
    later.set()
    assert await process.wait() == -signal.SIGPROF
    children.kill(process)  # no effect


async def test_a_child_that_ends_as_it_is_told_to_leave(later: threading.Event) -> None:
    child = await Child.spawn("child", ["sleep", "1000"], on_line=print, on_status=print)
    end(child.pid)
    child.terminate()
    later.set()
    assert await child.wait() == -signal.SIGPROF


async def test_a_running_process_is_signalled() -> None:
    process = await asyncio.create_subprocess_exec("sleep", "1000")
    children.send(process, signal.SIGTERM)
    assert await process.wait() == -signal.SIGTERM
