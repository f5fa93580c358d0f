"""Replica policies, the prefix index and the replica meter."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import load
from penstock.config.describe import keys
from penstock.engine.kv.block_hash import block_names
from penstock.engine.request import Delta, EngineLoad, Request, SamplingParams
from penstock.errors import ConfigError
from penstock.routing.meter import ReplicaMeter
from penstock.routing.policies import (
    POLICIES,
    PowerOfTwo,
    Predicted,
    Random,
    RoundRobin,
    make_policy,
    replica_policy,
)
from penstock.routing.policy import ReplicaRequest, ReplicaView
from penstock.routing.prefix_index import PrefixIndex

views = st.lists(
    st.builds(
        ReplicaView,
        name=st.sampled_from("abcd"),
        running=st.integers(0, 300),
        waiting=st.integers(0, 300),
        slots=st.integers(0, 256),
        queued_tokens=st.integers(0, 100_000),
        decoding_tokens=st.integers(0, 100_000),
        kv_use=st.floats(0, 1),
        total_blocks=st.integers(0, 10_000),
        prefill_tokens_per_s=st.none() | st.floats(0.1, 1e6),
        decode_tokens_per_s=st.none() | st.floats(0.1, 1e6),
        weight=st.sampled_from((0.0, 0.1, 1.0)),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda view: view.name,
)


def ask(prompt: Sequence[int] = range(100), session: str = "", tenant: str = "", output: int = 50) -> ReplicaRequest:
    request = Request("r", list(prompt), SamplingParams())
    return ReplicaRequest.of(request, 16, expected_output=output, wants_blocks=True, session=session, tenant=tenant)


def fleet(count: int = 4, **same: float) -> list[ReplicaView]:
    base = ReplicaView("", slots=64, total_blocks=1000, prefill_tokens_per_s=1000.0, decode_tokens_per_s=200.0)
    return [replace(base, name=str(index), **same) for index in range(count)]


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=25)
@given(candidates=views)
def test_every_policy_chooses_one_that_is_trusted(name: str, candidates: list[ReplicaView]) -> None:
    policy = make_policy(name)
    for _ in range(3):
        chosen = policy.choose(ask(), candidates)
        assert 0 <= chosen < len(candidates)
        assert candidates[chosen].weight > 0 or all(view.weight == 0 for view in candidates)


def test_a_new_policy_is_one_class_and_the_configuration_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.routing.policies.POLICIES", {**POLICIES})
    monkeypatch.chdir("/")

    @replica_policy("first")
    class First(RoundRobin):
        def choose(self, request: ReplicaRequest, candidates: Sequence[ReplicaView]) -> int:
            return 0

    config = load(environ={"PENSTOCK_ROUTING__POLICY": "first"})
    assert config.routing.policy == "first" and isinstance(make_policy("first"), First)
    accepted = next(key.accepts for key in keys() if key.path == "routing.policy")
    assert accepted.startswith("one of ") and accepted.endswith(", first")
    with pytest.raises(ConfigError, match=r"routing\.policy: expected one of .*, first, found 'last'"):
        load(environ={"PENSTOCK_ROUTING__POLICY": "last"})


def test_round_robin_is_even_and_random_follows_weights() -> None:
    turns, luck = RoundRobin(), Random(random.Random(1))
    assert set(Counter(turns.choose(ask(), fleet()) for _ in range(40)).values()) == {10}
    candidates = fleet(2)
    candidates[1] = replace(candidates[1], weight=0.1)
    counts = Counter(luck.choose(ask(), candidates) for _ in range(1100))
    assert 60 < counts[1] < 150


def test_power_of_two_prefers_the_less_busy() -> None:
    policy, candidates = PowerOfTwo(random.Random(1)), fleet(4)
    candidates[0] = replace(candidates[0], waiting=50)
    counts = Counter(policy.choose(ask(), candidates) for _ in range(1000))
    assert counts[0] == 0, "of any two, the other is less busy"


def test_a_prefix_draws_requests_until_its_replica_is_busier_than_computing_it_anew() -> None:
    policy, candidates = Predicted(), fleet()
    home = policy.choose(ask(range(1000)), candidates)
    assert all(policy.choose(ask(range(1000)), candidates) == home for _ in range(5))
    # About 1 s of prompt is in its cache: 0.5 s of queue is worth it, 1.5 s is not.
    candidates[home] = replace(candidates[home], queued_tokens=500)
    assert policy.choose(ask(range(1000)), candidates) == home
    candidates[home] = replace(candidates[home], queued_tokens=1500)
    assert policy.choose(ask(range(1000)), candidates) != home


def test_a_replica_that_lost_its_cache_draws_nobody() -> None:
    policy, candidates = Predicted(), fleet()
    home = policy.choose(ask(range(1000)), candidates)
    policy.forget(str(home))
    candidates[home] = replace(candidates[home], queued_tokens=10)
    assert policy.choose(ask(range(1000)), candidates) != home


def test_a_session_stays_where_it_was_and_tenants_do_not_share_sessions() -> None:
    policy, candidates = Predicted(), fleet()
    home = policy.choose(ask([1], session="s", tenant="a"), candidates)
    for _ in range(8):
        assert policy.choose(ask([2], session="s", tenant="a"), candidates) == home
    others = {policy.choose(ask([3 + n], session="s", tenant=f"b{n}"), candidates) for n in range(8)}
    assert others != {home}


def test_full_memory_and_full_slots_repel() -> None:
    policy, candidates = Predicted(), fleet(2)
    candidates[0] = replace(candidates[0], kv_use=0.99)
    assert {policy.choose(ask([n]), candidates) for n in range(4)} == {1}
    candidates = fleet(2)
    candidates[0] = replace(candidates[0], running=64, decoding_tokens=6400)
    candidates[1] = replace(candidates[1], running=32, decoding_tokens=3200)
    assert {policy.choose(ask([n]), candidates) for n in range(4)} == {1}


def test_without_any_measurement_the_load_still_decides() -> None:
    policy = Predicted()
    candidates = [ReplicaView("a", waiting=9, queued_tokens=900), ReplicaView("b"), ReplicaView("c", queued_tokens=1)]
    assert policy.choose(ask(), candidates) == 1


def test_blocks_have_the_names_that_engines_give_them() -> None:
    request = Request("r", list(range(100)), SamplingParams(), cache_salt="acme")
    found = ReplicaRequest.of(request, 16, expected_output=5, wants_blocks=True)
    assert found.blocks == block_names(list(range(100)), 16, "acme") and len(found.blocks) == 6
    assert not ReplicaRequest.of(request, 16, expected_output=5, wants_blocks=False).blocks


def test_the_index_forgets_ends_before_beginnings() -> None:
    index, names = PrefixIndex(), block_names(list(range(160)), 16)
    index.sent("a", names, capacity=6)
    assert index.matched("a", names) == 6
    index.sent("a", block_names(list(range(500, 548)), 16), capacity=6)
    assert index.matched("a", names) == 3
    assert index.matched("b", names) == 0


def test_the_meter_counts_what_the_snapshot_does_not_know_yet() -> None:
    meter = ReplicaMeter()
    for name in "abc":
        meter.sent(name, 100, 20, now=0.0)
    view = meter.view("0", EngineLoad(running=1, total_blocks=10, used_blocks=5), None, now=0.0)
    assert (view.running, view.waiting, view.queued_tokens, view.decoding_tokens, view.kv_use) == (1, 2, 300, 60, 0.5)
    meter.received(Delta("a", [1], cached_tokens=0), now=1.0)
    meter.received(Delta("a", [2], finish_reason="stop"), now=2.0)
    meter.ended("b", now=2.0)
    view = meter.view("0", EngineLoad(), None, now=2.0)
    assert (view.queued_tokens, view.decoding_tokens) == (100, 20)
    assert view.prefill_tokens_per_s is not None and 45 < view.prefill_tokens_per_s < 55
    meter.forget_speed()
    assert meter.view("0", EngineLoad(), None, now=2.0).prefill_tokens_per_s is not None, "work is still under way"
    meter.lost(now=60.0)
    view = meter.view("0", EngineLoad(), None, now=60.0)
    assert view.queued_tokens == 0 == meter.in_flight
    assert view.prefill_tokens_per_s is None, "an outage is not its speed"


events = st.lists(st.tuples(st.sampled_from("stpe"), st.integers(0, 5), st.integers(1, 40)), max_size=60)


@settings(max_examples=40)
@given(events=events)
def test_a_meter_whose_work_is_over_holds_nothing(events: list[tuple[str, int, int]]) -> None:
    meter, now = ReplicaMeter(), 0.0
    live: set[str] = set()
    for kind, who, amount in events:
        now, name = now + 0.1, f"r{who}"
        if kind == "s" and name not in live:
            meter.sent(name, amount, amount, now)
            live.add(name)
        elif kind in "tp":
            meter.received(Delta(name, [0] * amount), now)
        elif kind == "e":
            meter.ended(name, now)
            live.discard(name)
        view = meter.view("0", EngineLoad(), None, now)
        assert view.queued_tokens >= 0 and view.decoding_tokens >= 0 and view.waiting == len(live)
    meter.lost(now)
    view = meter.view("0", EngineLoad(), None, now)
    assert (view.queued_tokens, view.decoding_tokens, view.waiting) == (0, 0, 0)


def test_the_predicted_seconds_are_the_sum_of_what_delays_the_first_token() -> None:
    policy, asking = Predicted(), ask(range(100), output=50)
    idle = ReplicaView("a", slots=10, total_blocks=1000, prefill_tokens_per_s=1000.0, decode_tokens_per_s=200.0)
    assert policy.seconds(asking, idle) == pytest.approx(0.1)
    assert policy.seconds(asking, replace(idle, queued_tokens=400)) == pytest.approx(0.5)
    assert policy.seconds(asking, replace(idle, running=3, waiting=2)) == pytest.approx(0.1 + 0.1 * 5 / 10)
    assert policy.seconds(asking, replace(idle, running=9, decoding_tokens=900)) == pytest.approx(0.1 + 0.09)
    full = replace(idle, running=10, waiting=2, decoding_tokens=1200)
    assert policy.seconds(asking, full) == pytest.approx(0.1 + 3 * 1200 / 12 / 200 + 0.1)
    assert policy.seconds(asking, replace(full, slots=0)) == pytest.approx(0.1)
    unmeasured = replace(idle, prefill_tokens_per_s=None, decode_tokens_per_s=None)
    assert policy.seconds(asking, unmeasured) == pytest.approx(100 / 2000)
    late = replace(unmeasured, running=10, decoding_tokens=1000)
    assert policy.seconds(asking, late) == pytest.approx(0.05 + 1000 / 10 / 500 + 0.1)
    assert policy.seconds(asking, replace(idle, weight=0.5)) == pytest.approx(0.2)
    assert policy.seconds(asking, replace(idle, weight=0.0)) == pytest.approx(0.1)
    crowded = replace(idle, kv_use=0.9, total_blocks=1500)
    over = (0.9 + 150 / 16 / 1500 - 0.8) / 0.2
    assert policy.seconds(asking, crowded) == pytest.approx(0.1 + 2.0 * over**2)
    assert policy.seconds(asking, replace(crowded, total_blocks=0)) == pytest.approx(0.1)


def test_a_known_prefix_and_a_session_shorten_the_prediction() -> None:
    policy, asking = Predicted(), ask(range(100), session="s", tenant="t")
    idle = ReplicaView("a", slots=10, total_blocks=1000, prefill_tokens_per_s=1000.0)
    assert policy.choose(asking, [idle]) == 0
    assert policy.seconds(asking, idle) == pytest.approx(0.004 - 0.05), "96 tokens are cached, and the session is there"
    assert policy.seconds(replace(asking, session="other"), idle) == pytest.approx(0.004)
    assert policy.seconds(replace(asking, tenant="other"), idle) == pytest.approx(0.004)
    policy.forget("a")
    assert policy.seconds(replace(asking, session="other"), idle) == pytest.approx(0.1)


def test_equal_replicas_take_turns_and_measured_ones_stand_for_the_unmeasured() -> None:
    policy, asking = Predicted(), ask(range(0))
    equal = fleet(3)
    assert sorted(Counter(policy.choose(asking, equal) for _ in range(9)).values()) == [3, 3, 3]
    slow, new = replace(equal[0], prefill_tokens_per_s=10.0), replace(equal[1], prefill_tokens_per_s=None)
    quick = replace(equal[2], prefill_tokens_per_s=100.0)
    # The new one counts as 55 tokens per second, the mean of the others: between them.
    assert [policy.choose(ask([index] * 990), [slow, new, quick]) for index in range(2)] == [2, 2]
    assert policy.choose(ask([7] * 990), [slow, new]) in (0, 1)
    assert [policy.choose(ask([index + 9] * 990), [slow, replace(new, queued_tokens=1)]) for index in range(4)] == [
        0
    ] * 4


def test_the_sessions_that_were_used_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.routing.policies.SESSIONS", 2)
    policy, one = Predicted(), fleet(1)
    for session in ("a", "b", "a", "c", ""):
        policy.choose(ask([], session=session), one)
    assert [key for _, key in policy._sessions] == ["a", "c"]


def test_only_policies_that_look_at_prefixes_ask_for_blocks() -> None:
    assert {name for name, policy in POLICIES.items() if policy().wants_blocks} == {"predicted"}
