"""Replica policies on one workload, in simulated time."""

from __future__ import annotations

import pytest

from penstock.bench.replica_policies import ConversationWorkload, compare


def beats(work: ConversationWorkload) -> None:
    results = compare(work, ("predicted", "round_robin", "random"))
    ours = results.pop("predicted")
    for name, theirs in results.items():
        assert ours["hit_rate"] > theirs["hit_rate"] + 0.05, name
        assert ours["ttft_p50_s"] < theirs["ttft_p50_s"], name
        assert ours["ttft_p99_s"] < theirs["ttft_p99_s"], name
        assert ours["tokens_per_s"] > theirs["tokens_per_s"], name


def test_our_policy_beats_round_robin_and_random_on_everything() -> None:
    beats(ConversationWorkload(seconds=5.0, rate=28.0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_our_policy_beats_them_at_length(seed: int) -> None:
    beats(ConversationWorkload(seed=seed, seconds=120.0))
