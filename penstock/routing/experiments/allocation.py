"""Which arm a user belongs to: a table of 10,000 buckets.

A hash puts every user (or session, or request) into one bucket, the same in all processes. An arm that grows takes
buckets from the control only, one that shrinks gives its newest ones back. Invariant: whoever is in a canary stays in
it while its share does not shrink, however the other arms change. A share is exact to a hundredth of a percent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

BUCKETS = 10_000
CONTROL = "control"
"""The arm of all that no canary has."""

Intervals = Sequence[tuple[int, int]]
"""Buckets from the first up to, without, the second number; in the order in which they were taken."""


class Allocation:
    """The buckets of each canary. Immutable."""

    __slots__ = ("_arms", "_intervals")

    def __init__(self, intervals: Mapping[str, Intervals] | None = None) -> None:
        self._intervals = {arm: tuple((int(a), int(b)) for a, b in of) for arm, of in (intervals or {}).items()}
        self._arms = [CONTROL] * BUCKETS
        for arm, of in self._intervals.items():
            for begin, end in of:
                for bucket in range(begin, end):
                    if self._arms[bucket] != CONTROL:
                        raise ValueError(f"bucket {bucket} belongs to two arms")
                    self._arms[bucket] = arm

    @property
    def intervals(self) -> dict[str, Intervals]:
        return dict(self._intervals)

    def arm(self, bucket: int) -> str:
        return self._arms[bucket]

    def share(self, arm: str) -> float:
        if arm == CONTROL:
            return 1.0 - sum(_size(of) for of in self._intervals.values()) / BUCKETS
        return _size(self._intervals.get(arm, ())) / BUCKETS

    def resized(self, shares: Mapping[str, float]) -> Allocation:
        """With these shares; an arm that is not among them gets none. Those that shrink do so first."""
        wanted = {arm: round(share * BUCKETS) for arm, share in shares.items()}
        if sum(wanted.values()) > BUCKETS or min(wanted.values(), default=0) < 0:
            raise ValueError("the shares of all canaries together must be from 0 to 100%")
        kept = {arm: _first(self._intervals.get(arm, ()), count) for arm, count in wanted.items()}
        free = _gaps(interval for of in kept.values() for interval in of)
        for arm, count in wanted.items():
            missing = count - _size(kept[arm])
            while missing:
                begin, end = free.pop(0)
                taken = min(missing, end - begin)
                kept[arm] = _joined(kept[arm], (begin, begin + taken))
                if begin + taken < end:
                    free.insert(0, (begin + taken, end))
                missing -= taken
        return Allocation({arm: of for arm, of in kept.items() if of})


def bucket_of(experiment: str, unit: str) -> int:
    """The bucket of a unit; other experiments have other ones for it."""
    digest = hashlib.blake2b(f"{experiment}\0{unit}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") * BUCKETS >> 64


def _size(intervals: Intervals) -> int:
    return sum(end - begin for begin, end in intervals)


def _first(intervals: Intervals, count: int) -> Intervals:
    """The `count` buckets that were taken first."""
    kept: list[tuple[int, int]] = []
    for begin, end in intervals:
        taken = min(count, end - begin)
        if taken:
            kept.append((begin, begin + taken))
        count -= taken
    return kept


def _joined(intervals: Intervals, added: tuple[int, int]) -> Intervals:
    if intervals and intervals[-1][1] == added[0]:
        return [*intervals[:-1], (intervals[-1][0], added[1])]
    return [*intervals, added]


def _gaps(taken: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is free between intervals, lowest first."""
    found, at = [], 0
    for begin, end in sorted(taken):
        if begin > at:
            found.append((at, begin))
        at = end
    return [*found, (at, BUCKETS)] if at < BUCKETS else found
