"""Gaps between tokens in buckets."""

from __future__ import annotations

import random

import pytest

from penstock.simulation.gaps import GapCounts


def test_percentiles_are_within_a_bucket() -> None:
    rng = random.Random(1)
    gaps = sorted(rng.lognormvariate(-4.0, 0.7) for _ in range(5000))
    counts = GapCounts()
    for gap in gaps:
        counts.add(gap)
    for fraction in (0.01, 0.5, 0.9, 0.99):
        assert counts.percentile(fraction) == pytest.approx(gaps[int(fraction * 4999)], rel=0.02)
    assert counts.share_up_to(gaps[2500]) == pytest.approx(0.5, abs=0.02)
    assert GapCounts().percentile(0.5) is None


@pytest.mark.parametrize(
    ("first", "last", "count"), [(0.01, 0.01, 7), (0.01, 0.02, 500), (0.03, 0.031, 2), (5.0, 5.0, 1)]
)
def test_gaps_that_grow_evenly_count_as_one_by_one(first: float, last: float, count: int) -> None:
    together, apart = GapCounts(), GapCounts()
    together.add_counts(GapCounts.between(first, last, count))
    for step in range(count):
        apart.add(first + (last - first) * step / max(count - 1, 1))
    assert together.count == apart.count == count
    for fraction in (0.0, 0.25, 0.5, 0.75, 1.0):
        assert together.percentile(fraction) == pytest.approx(apart.percentile(fraction) or 0.0, rel=0.021)
