"""An engine whose ranks are started again one by one (`rank_restarts`), instead of the engine as a whole.

When a rank dies, what all had in their caches is lost: the engine starts its sequences over, and takes no step until
the rank is there again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, TypeVar

from penstock.errors import ReplicaLost

if TYPE_CHECKING:
    from penstock.engine.parallel.launch import Ranks

T = TypeVar("T")
_WAIT_S = 0.05
"""How long a step waits for a rank that is being started again."""


class RankRestarts:
    """Takes an engine's steps, and notices when one fails for a rank that is gone."""

    def __init__(self, ranks: Ranks, start_over: Callable[[str], None]) -> None:
        """`start_over` is told which rank is lost; the engine forgets what was in flight and in the caches."""
        self._ranks = ranks
        self._start_over = start_over
        self._restart: Future[None] | None = None
        if ranks.restarts:
            ranks.listen()

    @property
    def under_way(self) -> bool:
        """Whether a rank is being started again; nothing runs until then."""
        return self._restart is not None

    @property
    def due(self) -> bool:
        """Whether one is, or will be."""
        return self._restart is not None or self._ranks.died

    def step(self, step: Callable[[], T | None]) -> T | None:
        """Take a step, or do something else that needs all ranks; if one is gone, begin to start it again."""
        ranks = self._ranks
        try:
            if not (ranks.died and ranks.restartable):
                return step()
            lost = "a rank is gone"
        except ReplicaLost as error:
            if not ranks.restartable:
                raise
            lost = str(error)
        # Outside of the handler: what failed holds on to transfers, and those to the other ranks.
        self._start_over(lost)
        self._restart = ranks.restart()
        return None

    def wait(self) -> None:
        """Wait a moment for the rank; once it is there, give it what it had. Raises `ReplicaLost` when it could not be
        started."""
        restart = self._restart
        assert restart is not None
        wait([restart], timeout=_WAIT_S)
        if restart.done():
            self._restart = None
            restart.result()
            self.step(self._renew)

    def _renew(self) -> None:
        for then in self._ranks.after_restart:
            then()
