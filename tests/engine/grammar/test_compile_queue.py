"""Grammars wait in a queue in which owners take turns, and leave it with their requests."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from penstock.engine.grammar.compile_queue import CompileQueue, Job, QueueFull
from penstock.engine.grammar.interface import Interrupted


class Work:
    """Jobs that run until they are let go."""

    def __init__(self, queue: CompileQueue) -> None:
        self.queue = queue
        self.started: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self._changed = threading.Condition()

    def submit(self, owner: str, name: str) -> Job[str]:
        gate = self.gates[name] = threading.Event()

        def run(job: Job[str]) -> str:
            killed = threading.Event()

            def kill() -> None:
                killed.set()
                gate.set()

            job.interruptible(kill)
            with self._changed:
                self.started.append(name)
                self._changed.notify_all()
            assert gate.wait(100)
            job.interruptible(None)
            if killed.is_set():
                raise Interrupted("killed")
            return name

        return self.queue.submit(owner, run)

    def wait(self, count: int) -> list[str]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.started) >= count, 100)
            return list(self.started)

    def finish(self, name: str, future: Future[Any]) -> None:
        self.gates[name].set()
        assert future.result(100) == name


def test_owners_take_turns_and_have_one_running_each() -> None:
    work = Work(CompileQueue("test", threads=2))
    greedy = [work.submit("greedy", f"g{i}") for i in range(5)]
    other = work.submit("other", "o0")
    # The second thread is free for the other owner although four grammars came before.
    assert set(work.wait(2)) == {"g0", "o0"}
    third = work.submit("third", "t0")
    work.finish("g0", greedy[0].future)
    work.finish("o0", other.future)
    assert set(work.wait(4)[2:]) == {"g1", "t0"}
    for gate in work.gates.values():
        gate.set()
    assert third.future.result(100) == "t0"
    assert [job.future.result(100) for job in greedy] == ["g0", "g1", "g2", "g3", "g4"]


def test_what_waits_is_bounded_per_owner() -> None:
    work = Work(CompileQueue("test", threads=1, waiting_per_owner=2))
    work.submit("a", "running")
    work.wait(1)
    waiting = [work.submit("a", f"w{i}") for i in range(2)]
    with pytest.raises(QueueFull, match="2 new grammars"):
        work.submit("a", "one too many")
    work.submit("b", "of another")
    waiting[0].cancel()  # its place is free again
    work.submit("a", "in its place")
    for gate in work.gates.values():
        gate.set()


def test_a_job_is_dropped_or_interrupted_with_its_request() -> None:
    work = Work(CompileQueue("test", threads=1))
    running, waiting = work.submit("a", "running"), work.submit("a", "waiting")
    work.wait(1)
    waiting.cancel()
    running.cancel()
    with pytest.raises(Interrupted):
        running.future.result(100)
    assert waiting.future.cancelled()
    after = work.submit("a", "after")
    assert work.wait(2) == ["running", "after"]
    work.finish("after", after.future)


def test_a_closed_queue_drops_what_waits() -> None:
    queue = CompileQueue("test", threads=1)
    work = Work(queue)
    running, waiting = work.submit("a", "running"), work.submit("a", "waiting")
    work.wait(1)
    queue.close()
    assert waiting.future.cancelled()
    work.finish("running", running.future)
