"""Sizes of steps that are captured after the start: in moments without work, or once they have been wanted often.

Until then a larger size stands in, padded. So a start captures few graphs, and an engine that never rests still gets
those that its load needs: capturing one takes about as long as ten steps, and padding costs a part of each. Those that
are wanted often are captured while the device is busy with a long step (`due`). Where no step is long enough, running
sequences have to wait for a capture after all, rarely.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

log = logging.getLogger("penstock.engine")
Size = TypeVar("Size", bound=Hashable)
_PATIENCE = 3
"""A size that was wanted so many times more often than it needs to be has found no long step."""
_APART_S = 0.5
"""Between two captures that sequences have to wait for: of a hundred gaps between tokens, at most one is longer."""


class Deferred(Generic[Size]):
    """The sizes that are not captured yet, in the order in which they shall be."""

    def __init__(self, often: int, sizes: Iterable[Size] = (), *, clock: Callable[[], float] = time.monotonic) -> None:
        """`often`: steps that a larger size stands in for before a size is captured while there is work."""
        self._often: float = often
        self._wanted = dict.fromkeys(sizes, 0)
        """How many steps each would have been the best for."""
        self._due: dict[Size, None] = {}
        self._clock = clock
        self._waited_at = float("-inf")
        """When sequences had to wait for a capture."""

    def __contains__(self, size: Size) -> bool:
        return size in self._wanted

    @property
    def next(self) -> Size | None:
        return next(iter(self._wanted), None)

    @property
    def due(self) -> Size | None:
        """One that was wanted often, the first of them."""
        return next(iter(self._due), None)

    def add(self, sizes: Iterable[Size]) -> None:
        for size in sizes:
            self._wanted.setdefault(size, 0)

    def done(self, size: Size) -> None:
        """It was captured."""
        self._wanted.pop(size, None)
        self._due.pop(size, None)

    def give_up(self, error: Exception) -> None:
        """Sequences waited for a capture, and it failed."""
        log.warning("a step could not be captured, larger ones stand in: %s", error)
        self.only_when_idle()

    def only_when_idle(self) -> None:
        """Capture no more while there is work."""
        self._often = math.inf
        self._due.clear()

    def choose(self, fitting: Iterable[Size]) -> Size | None:
        """The size for a step: the first of those that fit, smallest first, that is captured or has to be now."""
        wanted = self._wanted
        best = True
        for size in fitting:
            count = wanted.get(size)
            if count is None:
                return size
            if best:
                best = False
                wanted[size] = count = count + 1
                if count >= self._often:
                    self._due[size] = None
                    if count >= self._often * _PATIENCE and self._clock() - self._waited_at >= _APART_S:
                        self._waited_at = self._clock()
                        return size
        return None


class LaterCaptures(ABC, Generic[Size]):
    """Graphs of which some are captured after the start."""

    _later: Deferred[Size]

    @abstractmethod
    def capture(self, size: Size, /) -> object:
        """Capture the step of this size."""

    def capture_next(self) -> bool:
        """Capture one of those that were left for later; False when there is none."""
        size = self._later.next
        if size is None:
            return False
        self.capture(size)
        return True

    @property
    def due(self) -> bool:
        """Whether one is wanted often that was left for later."""
        return self._later.due is not None

    def capture_due(self) -> None:
        """Capture such a one."""
        if (size := self._later.due) is not None:
            self.capture(size)

    def only_when_idle(self) -> None:
        """Capture no more of them while there is work: larger ones stand in."""
        self._later.only_when_idle()
