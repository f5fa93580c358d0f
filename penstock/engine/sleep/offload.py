"""An engine whose device memory is on the host, on all of its ranks.

Each rank moves its own, at the same time; the groups between them stay. An engine wakes on all ranks or on none: a rank
keeps what is on the host until every other one has found room, and if one has not, all are asleep as before.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.engine.core import Engine
from penstock.engine.kv.persistence import SLEEP_S
from penstock.engine.sleep.memory import OffloadedMemory, offload_memory
from penstock.engine.sleep.rank import RESUME, SLEEP, WAKE
from penstock.errors import ReplicaLost


@dataclass(frozen=True, slots=True)
class OffloadedEngine:
    """An engine whose device memory is on the host."""

    engine: Engine
    memory: OffloadedMemory
    """Of rank 0."""

    def restore(self) -> Engine:
        """Bring everything back; the engine can be used again, and the host's memory is free. Without room for all of
        it nothing is taken."""
        others = _tell(self.engine, WAKE)
        try:
            self.memory.restore()
            _await(others)
            others = _tell(self.engine, RESUME)
            self.memory.capture()
            _await(others)
        except BaseException:
            self.memory.empty()
            with suppress(ReplicaLost):  # then there is nothing to put to sleep
                _await(_tell(self.engine, SLEEP))
            raise
        self.memory.discard()
        return self.engine


def offload(engine: Engine) -> OffloadedEngine:
    """Free the device memory of an idle engine."""
    engine.save(SLEEP_S)
    engine.forget_caches(keep_disk=True)
    others = _tell(engine, SLEEP)
    memory = offload_memory(engine, engine.runner.backend)
    _await(others)
    return OffloadedEngine(engine, memory)


def _tell(engine: Engine, name: str) -> list[Future[Any]]:
    return [] if engine.ranks is None else engine.ranks.call(name)


def _await(answers: list[Future[Any]]) -> None:
    """Wait for all of them; the first problem is raised when all have answered."""
    problems = [answer.exception() for answer in answers]
    for problem in filter(None, problems):
        raise problem
