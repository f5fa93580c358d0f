"""Reciprocal rank fusion: rankings whose scores cannot be compared are joined by their ranks alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

RANK_OFFSET = 60
"""Damps the lead of the first places; the constant of the method's authors."""


def fuse(rankings: Iterable[Sequence[int]], weights: Iterable[float] | None = None) -> list[tuple[int, float]]:
    """Keys with their fused scores, best first; equal ones keep the order in which they were met."""
    scores: dict[int, float] = {}
    lists = list(rankings)
    for ranking, weight in zip(lists, weights or [1.0] * len(lists), strict=True):
        for rank, key in enumerate(ranking, start=1):
            scores[key] = scores.get(key, 0.0) + weight / (RANK_OFFSET + rank)
    return sorted(scores.items(), key=lambda item: -item[1])
