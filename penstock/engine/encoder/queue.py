"""Which texts are computed next: a pure queue of jobs, shared fairly.

Invariants: smaller priorities go first; within a priority the jobs take turns, one text each, so a job of one text
never waits for a job of thousands to end; a batch holds at most `token_budget` tokens, or one text.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.encoder.request import EncodeRequest


@dataclass(slots=True, eq=False)
class Job:
    """A request in progress: how many of its texts were handed out, and their results."""

    request: EncodeRequest
    arrived_at: float
    taken: int = 0
    missing: int = 0
    """Texts without a result yet."""
    begun_at: float | None = None
    results: list[Any] = field(default_factory=list)

    @property
    def waiting(self) -> int:
        return len(self.request.texts) - self.taken


Item = tuple[Job, int]
"""A text of a job."""


class TextQueue:
    """Jobs with texts that wait."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self.waiting = 0
        self._jobs: dict[str, Job] = {}
        self._turns: dict[int, deque[Job]] = {}

    def __len__(self) -> int:
        """Jobs that are not finished."""
        return len(self._jobs)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._jobs

    def add(self, request: EncodeRequest, now: float) -> bool:
        """False when there is no room. A request larger than the queue is accepted when the queue is empty."""
        count = len(request.texts)
        if self.waiting and self.waiting + count > self.max_waiting:
            return False
        job = Job(request, now, missing=count, results=[None] * count)
        self._jobs[request.request_id] = job
        self._turns.setdefault(request.priority, deque()).append(job)
        self.waiting += count
        return True

    def drop(self, request_id: str) -> bool:
        """Forget a job, wherever it is."""
        job = self._jobs.pop(request_id, None)
        if job is None:
            return False
        if job.waiting:
            self.waiting -= job.waiting
            turns = self._turns[job.request.priority]
            turns.remove(job)
            if not turns:
                del self._turns[job.request.priority]
        return True

    def take(self, token_budget: int) -> list[Item]:
        """The texts of the next batch."""
        batch: list[Item] = []
        left = token_budget
        for priority in sorted(self._turns):
            turns = self._turns[priority]
            while turns:
                job = turns[0]
                size = len(job.request.texts[job.taken])
                if batch and size > left:
                    return batch
                turns.popleft()
                batch.append((job, job.taken))
                job.taken += 1
                self.waiting -= 1
                left -= size
                if job.waiting:
                    turns.append(job)
            del self._turns[priority]
        return batch

    def finish(self, job: Job) -> None:
        """Remove a job whose texts all have results."""
        self._jobs.pop(job.request.request_id, None)
