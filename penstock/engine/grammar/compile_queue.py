"""Grammars waiting to be compiled: owners take turns, each has one running and a bounded number waiting.

So one tenant's grammars, however many and however slow, delay another's by at most the one that is running. A job that
nobody waits for any more is dropped from the queue, or interrupted if it runs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from penstock.engine.grammar.interface import Interrupted
from penstock.errors import PenstockError

THREADS = 2
"""Jobs that run at a time. They wait for processes or run outside the interpreter lock."""
WAITING_PER_OWNER = 16

T = TypeVar("T")


class QueueFull(PenstockError):
    """An owner has too many grammars waiting."""


class Job(Generic[T]):
    """One grammar on its way. `run` gets the job, so that it can say how to be interrupted."""

    __slots__ = ("_interrupt", "_lock", "cancelled", "future", "owner", "run")

    def __init__(self, owner: str, run: Callable[[Job[T]], T]) -> None:
        self.owner = owner
        self.run = run
        self.future: Future[T] = Future()
        self.cancelled = False
        self._interrupt: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def interruptible(self, interrupt: Callable[[], None] | None) -> None:
        """How to end what runs now; None when nothing does. Raises `Interrupted` when that was asked for already."""
        with self._lock:
            self._interrupt = interrupt
            if self.cancelled and interrupt is not None:
                raise Interrupted("nobody waits for this grammar any more")

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            self.cancelled = True
            if not self.future.cancel() and self._interrupt is not None:
                self._interrupt()


class CompileQueue:
    """Runs jobs on a few threads, which start with the first job."""

    def __init__(self, name: str, *, threads: int = THREADS, waiting_per_owner: int = WAITING_PER_OWNER) -> None:
        self._name = name
        self._threads = threads
        self._limit = waiting_per_owner
        self._waiting: dict[str, deque[Job[object]]] = {}
        """In the order in which owners take their turns."""
        self._running: set[str] = set()
        self._started = 0
        self._closed = False
        self._changed = threading.Condition()

    def submit(self, owner: str, run: Callable[[Job[T]], T]) -> Job[T]:
        job = Job(owner, run)
        with self._changed:
            waiting = self._waiting.setdefault(owner, deque())
            while waiting and waiting[0].future.cancelled():
                waiting.popleft()
            if len(waiting) >= self._limit:
                raise QueueFull(f"{len(waiting)} new grammars already wait to be compiled")
            waiting.append(job)  # type: ignore[arg-type]
            if self._started < self._threads:
                self._started += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            self._changed.notify()
        return job

    def close(self) -> None:
        """Drop what waits; threads end when their job does."""
        with self._changed:
            self._closed = True
            for waiting in self._waiting.values():
                for job in waiting:
                    job.future.cancel()
            self._waiting.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            if job.future.set_running_or_notify_cancel():
                try:
                    job.future.set_result(job.run(job))
                except BaseException as error:
                    job.future.set_exception(error)
            with self._changed:
                self._running.discard(job.owner)
                self._changed.notify()
            del job  # a thread that waits holds no grammar

    def _next(self) -> Job[object] | None:
        """The job whose turn it is; None when the queue is closed."""
        with self._changed:
            while not self._closed:
                owner = next((owner for owner in self._waiting if owner not in self._running), None)
                if owner is None:
                    self._changed.wait()
                    continue
                waiting = self._waiting.pop(owner)
                job = waiting.popleft()
                if waiting:
                    self._waiting[owner] = waiting  # behind the others
                self._running.add(owner)
                return job
        return None
