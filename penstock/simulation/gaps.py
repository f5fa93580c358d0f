"""Times between tokens, as counts in buckets that grow by 2%: bounded memory for any number of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import ceil, exp, floor, log

_PER_E = 50
_LEAST = 1e-5
_BUCKETS = 920
"""Up to about 1,000 seconds."""
_OFFSET = -log(_LEAST) * _PER_E


@lru_cache(maxsize=256)
def bucket(seconds: float) -> int:
    if seconds <= _LEAST:
        return 0
    return min(int(log(seconds) * _PER_E + _OFFSET), _BUCKETS - 1)


class GapCounts:
    """A histogram of token gaps."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        index = bucket(seconds)
        self._counts[index] = self._counts.get(index, 0) + 1

    @staticmethod
    def between(first: float, last: float, count: int) -> list[tuple[int, int]]:
        """Buckets and counts of `count` gaps that grow evenly from `first` to `last`."""
        low, high = bucket(first), bucket(last)
        if low == high or count == 1:
            return [(low, count)]
        slope = (last - first) / (count - 1)
        found: list[tuple[int, int]] = []
        begin = 0
        for index in range(low, high):
            border = exp((index + 1 - _OFFSET) / _PER_E)
            end = min(max(ceil((border - first) / slope), begin), count)
            found.append((index, end - begin))
            begin = end
        found.append((high, count - begin))
        return found

    def add_counts(self, counts: Iterable[tuple[int, int]]) -> None:
        mine = self._counts
        for index, count in counts:
            mine[index] = mine.get(index, 0) + count

    def replace(self, counted: float, actual: float) -> None:
        """One gap was counted that is really another."""
        self._counts[bucket(counted)] -= 1
        self.add(actual)

    def merge(self, other: GapCounts) -> None:
        self.add_counts(other._counts.items())

    @property
    def count(self) -> int:
        return sum(self._counts.values())

    def percentile(self, fraction: float) -> float | None:
        """The middle of the bucket in which that part of the gaps ends; None: there are no gaps."""
        total = self.count
        if not total:
            return None
        rank, seen = floor(fraction * (total - 1)), 0
        for index, count in sorted(self._counts.items()):
            seen += count
            if seen > rank:
                return exp((index + 0.5 - _OFFSET) / _PER_E)
        raise AssertionError("the counts add up")

    def share_up_to(self, seconds: float) -> float:
        """The part of the gaps that is at most so long, to within a bucket; 1 when there are none."""
        limit, total = bucket(seconds), self.count
        return sum(count for index, count in self._counts.items() if index <= limit) / total if total else 1.0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GapCounts) and self._counts == other._counts

    __hash__ = None  # type: ignore[assignment]
