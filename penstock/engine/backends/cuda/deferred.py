"""Sizes of steps that are captured after the start: in moments without work, or once they have been wanted often.

Until then a larger size stands in, padded. So a start captures few graphs, and an engine that never rests still gets
those that its load needs: capturing one takes about as long as ten steps, and padding costs a part of each.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Size = TypeVar("Size", bound=Hashable)


class Deferred(Generic[Size]):
    """The sizes that are not captured yet, in the order in which they shall be."""

    def __init__(self, often: int, sizes: Iterable[Size] = ()) -> None:
        """`often`: steps that a larger size stands in for before a size is captured while requests wait."""
        self._often = often
        self._wanted = dict.fromkeys(sizes, 0)
        """How many steps each would have been the best for."""

    def __contains__(self, size: Size) -> bool:
        return size in self._wanted

    @property
    def next(self) -> Size | None:
        return next(iter(self._wanted), None)

    def add(self, sizes: Iterable[Size]) -> None:
        for size in sizes:
            self._wanted.setdefault(size, 0)

    def done(self, size: Size) -> None:
        """It was captured."""
        self._wanted.pop(size, None)

    def choose(self, fitting: Iterable[Size]) -> Size | None:
        """The size for a step: the first of those that fit, smallest first, that is captured or may be now."""
        wanted = self._wanted
        best = True
        for size in fitting:
            count = wanted.get(size)
            if count is None:
                return size
            if best:
                best = False
                wanted[size] = count + 1
                if count + 1 >= self._often:
                    return size
        return None
