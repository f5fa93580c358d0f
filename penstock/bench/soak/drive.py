"""One round on a crowded engine: requests are submitted while there is room, cancelled when planned, and collected.

Time is counted in steps, so that a seed gives the same round on any machine, however busy; only the threads that
read adapters and compile grammars keep their own time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from penstock.bench.engine import BenchError
from penstock.bench.soak.engines import ADAPTERS, adapter_spec
from penstock.bench.soak.traffic import Case
from penstock.engine.adapters.pool import AdapterPool
from penstock.engine.adapters.spec import AdapterStatus
from penstock.engine.batch import Batch
from penstock.engine.core import Engine
from penstock.engine.request import Delta, Request, TokenLogprob
from penstock.engine.runner.step import PendingStep

STEP_S = 0.004
"""Duration of a step by the engine's clock."""
_CROWD = 28
"""Requests in the engine at once, running and waiting."""
_RELOADS = 0.01
"""Share of steps before which an adapter is replaced."""
_MOST_STEPS = 200_000
INJECTED = "a fault of the soak's own"


class Clock:
    """A clock that only the soak advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class Answer:
    """All deltas of one request."""

    case: Case
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    reason: str | None = None
    error: str | None = None

    def add(self, delta: Delta) -> None:
        if self.reason is not None:
            raise BenchError(f"{delta.request_id}: something came after {self.reason!r}")
        self.tokens += delta.tokens
        if delta.logprobs is not None:
            if len(delta.logprobs) != len(delta.tokens):
                raise BenchError(f"{delta.request_id}: {len(delta.logprobs)} logprobs of {len(delta.tokens)} tokens")
            self.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.reason, self.error = delta.finish_reason, delta.error


class Faults:
    """Makes steps of several sequences fail now and then, before they run."""

    def __init__(self, engine: Engine, rng: random.Random, chance: float) -> None:
        self.count = 0
        self._engine = engine
        self._run: Callable[[Batch], PendingStep] = engine.runner.run
        self._rng = rng
        self._chance = chance

    def __enter__(self) -> Faults:
        self._engine.runner.run = self._fail_or_run  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self._engine.runner.run

    def _fail_or_run(self, batch: Batch) -> PendingStep:
        if len(batch.chunks) > 1 and self._rng.random() < self._chance:
            self.count += 1
            raise RuntimeError(INJECTED)
        return self._run(batch)


class Round:
    """Runs cases to their end."""

    def __init__(self, engine: Engine, clock: Clock, folder: Path, rng: random.Random) -> None:
        self.engine = engine
        self.clock = clock
        self.folder = folder
        self.rng = rng
        self.answers: dict[str, Answer] = {}
        self.texts: list[list[int]] = []
        """Of requests that finished in this round, for others to continue."""
        self.reloads = 0
        self._live: set[str] = set()
        self._cancel_at: dict[int, list[str]] = {}
        self._steps = 0

    def run(self, count: int, case: Callable[[int, list[list[int]]], Case]) -> None:
        """Submit `case(0)`, `case(1)`, ... as there is room, until all have ended."""
        submitted = 0
        while submitted < count or self.engine.has_work:
            room = _CROWD - len(self._live)
            for _ in range(min(room, self.rng.choice((0, 0, 1, 1, 4)), count - submitted)):
                self._submit(case(submitted, self.texts))
                submitted += 1
            self._step()
            if self._steps > _MOST_STEPS:
                raise BenchError(f"the engine does not become idle; {sorted(self._live)} have not ended")
        if self._live:
            raise BenchError(f"the engine is idle, but {sorted(self._live)} have not ended")

    def _submit(self, case: Case) -> None:
        request: Request = case.request
        self.answers[request.request_id] = Answer(case)
        self._live.add(request.request_id)
        self.engine.submit(request)
        if case.fate == "cancel":
            self._cancel_at.setdefault(self._steps + case.after, []).append(request.request_id)

    def _step(self) -> None:
        for request_id in self._cancel_at.pop(self._steps, []):
            self.engine.abort(request_id)
        if self.engine.adapters is not None and self.rng.random() < _RELOADS:
            self._reload(self.engine.adapters, self.rng.choice(ADAPTERS))
        self._steps += 1
        self.clock.now += STEP_S
        output = self.engine.step()
        for delta in output.deltas if output is not None else ():
            answer = self.answers[delta.request_id]
            answer.add(delta)
            if delta.finish_reason is not None:
                self._live.remove(delta.request_id)
                if delta.finish_reason in ("stop", "complete", "length"):
                    self.texts.append(answer.case.request.prompt + answer.tokens)

    def _reload(self, pool: AdapterPool, name: str) -> None:
        """Forget an adapter or replace it, while it may be in use."""
        if pool.registry.get(name) is not None and self.rng.random() < 0.5:
            self.engine.unload_adapter(name)
        pool.load(adapter_spec(self.folder, name), self._reloaded)

    def _reloaded(self, status: AdapterStatus) -> None:
        # One that is replaced before it was read says so; then the one after it counts.
        self.reloads += status.state == "ready"
