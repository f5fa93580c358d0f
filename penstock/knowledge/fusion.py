"""Reciprocal rank fusion: merges rankings with incomparable scores by rank alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

RANK_OFFSET = 60
"""Damps the weight of the first ranks; the constant from the paper."""


def fuse(rankings: Iterable[Sequence[int]], weights: Iterable[float] | None = None) -> list[tuple[int, float]]:
    """Keys with their fused scores, best first; ties keep their order of appearance."""
    scores: dict[int, float] = {}
    lists = list(rankings)
    for ranking, weight in zip(lists, weights or [1.0] * len(lists), strict=True):
        for rank, key in enumerate(ranking, start=1):
            scores[key] = scores.get(key, 0.0) + weight / (RANK_OFFSET + rank)
    return sorted(scores.items(), key=lambda item: -item[1])
