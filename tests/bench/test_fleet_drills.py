"""Drills of routing and admission: replica policies on one workload, and ten times the traffic for a while."""

from __future__ import annotations

import asyncio

import pytest

from penstock.bench.gateway.spike import Spike, drill, problems
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


def test_a_short_spike_is_survived() -> None:
    spike = Spike(
        rate=4.0, before=1.0, burst=3.0, after=3.0, settle=2.0, slots=2, tokens=30, step=0.006, wait=1.5, limit=1.5
    )
    records, engines = asyncio.run(drill(spike))
    assert not problems(spike, records, engines)


@pytest.mark.slow
def test_ten_times_the_traffic_for_a_minute() -> None:
    spike = Spike()
    records, engines = asyncio.run(drill(spike))
    assert not problems(spike, records, engines)
