"""R-RT-10: arms are sticky, shares are exact, and whoever is in a canary stays in it while it grows."""

from __future__ import annotations

import random

import pytest

from penstock.routing.experiments.allocation import BUCKETS, CONTROL, Allocation, bucket_of

USERS = [bucket_of("assistant", f"user {number}") for number in range(20_000)]


def test_a_canary_that_grows_keeps_its_users_and_takes_new_ones_from_the_control_only() -> None:
    small = Allocation().resized({"v2": 0.05, "v3": 0.1})
    grown = small.resized({"v2": 0.25, "v3": 0.1})
    for bucket in range(BUCKETS):
        before, after = small.arm(bucket), grown.arm(bucket)
        assert before == after or (before, after) == (CONTROL, "v2")
    assert grown.share("v2") == 0.25 and grown.share("v3") == 0.1 and grown.share(CONTROL) == pytest.approx(0.65)


def test_any_change_of_shares_moves_as_few_users_as_it_can() -> None:
    draw, allocation = random.Random(7), Allocation()
    for _ in range(40):
        shares = {arm: draw.randrange(0, 3000) / BUCKETS for arm in ("a", "b", "c") if draw.random() < 0.8}
        changed = allocation.resized(shares)
        for arm in ("a", "b", "c"):
            assert changed.share(arm) == pytest.approx(shares.get(arm, 0.0))
            had = {bucket for bucket in range(BUCKETS) if allocation.arm(bucket) == arm}
            has = {bucket for bucket in range(BUCKETS) if changed.arm(bucket) == arm}
            assert had <= has or has <= had, "an arm either only wins or only loses buckets"
        assert Allocation(changed.intervals).intervals == changed.intervals
        allocation = changed


def test_users_are_spread_evenly_and_differently_in_every_experiment() -> None:
    allocation = Allocation().resized({"v2": 0.05})
    assert sum(allocation.arm(bucket) == "v2" for bucket in USERS) / len(USERS) == pytest.approx(0.05, abs=0.006)
    both = sum(
        allocation.arm(bucket_of(name, f"user {number}")) == "v2"
        for number in range(20_000)
        for name in ("other",)
        if allocation.arm(USERS[number]) == "v2"
    )
    assert both < 120, "about 5% of 5% of the users are in both canaries"


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="100%"):
        Allocation().resized({"a": 0.7, "b": 0.4})
    with pytest.raises(ValueError, match="two arms"):
        Allocation({"a": [(0, 10)], "b": [(9, 12)]})
