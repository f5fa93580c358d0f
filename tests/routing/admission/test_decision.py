"""The admission decision: capacity is used and never exceeded, a higher value only helps a request, and a refusal has a
reason and a retry time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.config.routing import AdmissionConfig
from penstock.protocol.errors import clamp_retry_after
from penstock.routing.admission.decision import (
    DecisionInput,
    Verdict,
    crowding,
    decide,
    fair_share,
    fits,
    predicted_wait,
    saturated,
    shed_share,
    value_of,
)
from penstock.routing.admission.queue import BATCH, PREMIUM, STANDARD, Capacity, QueueEntry, QueueState

amounts = st.integers(0, 20_000)
entries = st.builds(
    QueueEntry,
    id=st.just("r"),
    tenant=st.just("t"),
    rank=st.integers(0, 2),
    weight=st.floats(0.1, 10),
    cost=st.floats(1, 50_000),
    kv_tokens=amounts,
    slots=st.integers(1, 16),
)
asks = st.builds(
    DecisionInput,
    entry=entries,
    prompt_tokens=st.integers(1, 20_000),
    cached_tokens=amounts,
    budget_left=st.floats(0, 1),
    max_wait_s=st.floats(0.01, 600),
)
counts = st.integers(0, 600)
works = st.floats(0, 1e6)
rates = st.floats(0.1, 1e5)
states = st.builds(
    QueueState,
    in_flight=st.integers(0, 300),
    kv_tokens=amounts,
    queued=st.tuples(counts, counts, counts),
    work=st.tuples(works, works, works),
    rates=st.none() | st.tuples(rates, rates, rates).map(lambda each: tuple(sorted(each, reverse=True))),
    own_work=works,
    active_weight=st.floats(0, 100),
    excess=works,
)
capacities = st.builds(
    Capacity, slots=st.none() | st.integers(0, 300), kv_tokens=st.none() | amounts, replicas=st.integers(1, 4)
)
orders = st.sampled_from(("fair", "priority", "fcfs", "sjf"))
rolls = st.floats(0, 1, exclude_max=True)
few = settings(max_examples=60)


@few
@given(asks, states, capacities, orders, rolls)
def test_room_is_used_at_once_and_never_exceeded(
    arriving: DecisionInput, state: QueueState, capacity: Capacity, order: str, roll: float
) -> None:
    verdict = decide(arriving, state, capacity, AdmissionConfig(order=order), roll)  # type: ignore[arg-type]
    free = fits(arriving.entry, state.in_flight, state.kv_tokens, capacity)
    assert (verdict.action == "admit") == (free and state.depth == 0)
    if verdict.action == "admit" and state.in_flight:
        assert capacity.slots is None or state.in_flight + arriving.entry.slots <= capacity.slots
        assert capacity.kv_tokens is None or state.kv_tokens + arriving.entry.kv_tokens <= capacity.kv_tokens


@few
@given(asks, states, capacities, orders, rolls)
def test_the_refused_hear_why_and_when_to_return_and_the_others_can_be_in_time(
    arriving: DecisionInput, state: QueueState, capacity: Capacity, order: str, roll: float
) -> None:
    rules = AdmissionConfig(order=order)  # type: ignore[arg-type]
    verdict = decide(arriving, state, capacity, rules, roll)
    if verdict.action == "refuse":
        assert verdict.reason in ("load_shed", "memory_pressure")
        assert 1 <= clamp_retry_after(verdict.wait_s) <= 120
    else:
        assert verdict.reason is None and verdict.wait_s < arriving.max_wait_s


@few
@given(states, capacities, rolls, entries)
def test_nobody_is_refused_while_the_queue_is_short(
    state: QueueState, capacity: Capacity, roll: float, entry: QueueEntry
) -> None:
    calm = replace(state, queued=(1, 1, 1), work=(1.0, 1.0, 1.0), rates=(1e3, 1e3, 1e3))
    assert decide(DecisionInput(entry), calm, capacity, AdmissionConfig(), roll).action != "refuse"


worse = st.sampled_from(("weight", "rank", "cost", "cached", "budget", "excess"))


@few
@given(asks, states, st.floats(0, 1.2), worse)
def test_what_speaks_for_a_request_can_only_help_it(
    arriving: DecisionInput, state: QueueState, pressure: float, what: str
) -> None:
    """Paid before free, short before long, cached before fresh, unspent before spent, under- before over-served."""
    rules, entry = AdmissionConfig(), arriving.entry
    good, bad, there = arriving, arriving, state
    if what == "weight":
        bad = replace(arriving, entry=replace(entry, weight=entry.weight / 2))
    elif what == "rank":
        bad = replace(arriving, entry=replace(entry, rank=BATCH))
    elif what == "cost":
        bad = replace(arriving, entry=replace(entry, cost=entry.cost * 2))
    elif what == "cached":
        bad = replace(arriving, cached_tokens=arriving.cached_tokens // 2)
    elif what == "budget":
        bad = replace(arriving, budget_left=arriving.budget_left / 2)
    else:
        there = replace(state, excess=state.excess * 2 + 1)
    assert 0.0 <= value_of(bad, there) <= value_of(good, state) <= 1.0
    assert shed_share(pressure, value_of(bad, there), rules) >= shed_share(pressure, value_of(good, state), rules)


@few
@given(st.floats(0, 1), st.floats(0, 2), st.floats(0, 2))
def test_shedding_begins_at_80_percent_and_grows(value: float, one: float, other: float) -> None:
    rules = AdmissionConfig()
    low, high = sorted((one, other))
    assert shed_share(low, value, rules) <= shed_share(high, value, rules) <= 1.0
    assert shed_share(0.79, value, rules) == 0.0
    assert shed_share(1.0, 0.0, rules) == 1.0


@few
@given(states, entries)
def test_a_higher_class_never_waits_longer(state: QueueState, entry: QueueEntry) -> None:
    rules = AdmissionConfig(order="priority")
    waits = [predicted_wait(replace(entry, rank=rank), state, rules) for rank in (PREMIUM, STANDARD, BATCH)]
    assert waits == sorted(waits)


def test_a_flood_is_refused_and_its_neighbour_is_not() -> None:
    rules, capacity = AdmissionConfig(), Capacity(slots=4)
    flood = QueueState(4, 0, (0, 200, 0), (0.0, 2e5, 0.0), (1e4, 1e4, 1e4), own_work=2e5, active_weight=1.0)
    calm = replace(flood, own_work=0.0)
    assert decide(DecisionInput(QueueEntry("a", "flood")), flood, capacity, rules, 0.0).reason == "load_shed"
    assert decide(DecisionInput(QueueEntry("b", "calm")), calm, capacity, rules, 0.0).action == "queue"


def test_nobody_waits_longer_than_those_before_it_have_patience() -> None:
    rules = AdmissionConfig(wait_s=10.0)
    flood = QueueState(4, 0, (0, 200, 0), (0.0, 2e5, 0.0), (1e4, 1e4, 1e4), own_work=2e5, active_weight=1.0)
    assert predicted_wait(QueueEntry("a", "flood"), flood, rules) == 20.0
    assert predicted_wait(QueueEntry("a", "flood"), replace(flood, own_age_s=7.0), rules) == 3.0
    assert predicted_wait(QueueEntry("a", "flood"), replace(flood, own_age_s=70.0), rules) == 0.0


def test_missing_memory_is_called_so() -> None:
    state = QueueState(2, 900, (0, 50, 0), (0.0, 5e5, 0.0), (1e4, 1e4, 1e4), own_work=5e5, active_weight=1.0)
    long = DecisionInput(QueueEntry("a", "t", kv_tokens=200))
    assert decide(long, state, Capacity(slots=8, kv_tokens=1000), AdmissionConfig(), 0.0).reason == "memory_pressure"
    assert decide(long, state, Capacity(slots=2, kv_tokens=1000), AdmissionConfig(), 0.0).reason == "load_shed"


def test_saturation_is_more_than_ten_waiting_per_replica() -> None:
    rules = AdmissionConfig()
    assert not saturated(QueueState(queued=(0, 20, 0)), Capacity(replicas=2), rules)
    assert saturated(QueueState(queued=(1, 20, 0)), Capacity(replicas=2), rules)


RULES = AdmissionConfig()


def test_room_is_counted_to_the_last_slot_and_token() -> None:
    entry = QueueEntry("a", "t", slots=2, kv_tokens=100)
    assert fits(entry, 6, 900, Capacity(slots=8, kv_tokens=1000))
    assert not fits(entry, 7, 900, Capacity(slots=8, kv_tokens=1000))
    assert not fits(entry, 6, 901, Capacity(slots=8, kv_tokens=1000))
    assert fits(entry, 0, 901, Capacity(slots=1, kv_tokens=1)), "alone it always fits"
    assert fits(entry, 99, 99_999, Capacity())


def test_the_predicted_wait_is_the_work_ahead_at_the_rate_that_is_left() -> None:
    state = QueueState(
        queued=(1, 2, 3), work=(100.0, 400.0, 800.0), rates=(50.0, 20.0, 10.0), own_work=100.0, active_weight=4.0
    )
    entry = QueueEntry("a", "t", weight=2.0)
    waits = {
        order: [predicted_wait(replace(entry, rank=rank), state, AdmissionConfig(order=order)) for rank in range(3)]  # type: ignore[arg-type]
        for order in ("fcfs", "sjf", "priority", "fair")
    }
    assert waits["fcfs"] == waits["sjf"] == [1300.0 / 50] * 3
    assert waits["priority"] == [2.0, 2.0 + 20.0, 2.0 + 20.0 + 80.0]
    # Its own 100 of work take twice as long as alone: half of all weight is others'.
    assert waits["fair"] == [2.0, 2.0 + 10.0, 2.0 + 20.0 + 20.0]
    assert predicted_wait(entry, replace(state, rates=None), RULES) == 0.0


def test_a_tenants_share_of_the_work_ahead_follows_from_weights() -> None:
    state = QueueState(work=(0.0, 1000.0, 0.0), own_work=100.0, active_weight=4.0)
    assert fair_share(QueueEntry("a", "t", weight=2.0), state) == 0.2
    assert fair_share(QueueEntry("a", "t", weight=1.0), state) == 0.4
    assert fair_share(QueueEntry("a", "t", weight=0.1), state) == 1.0
    assert fair_share(QueueEntry("a", "t", weight=2.0), replace(state, own_work=0.0)) == 0.0
    assert fair_share(QueueEntry("a", "t", weight=2.0), replace(state, work=(1.0, 0.0, 1.0))) == 1.0
    assert fair_share(QueueEntry("a", "t"), replace(state, work=(0.0, 0.5, 0.0), own_work=0.1)) == 0.8


def test_a_queue_is_as_full_as_it_is_for_this_request() -> None:
    state = QueueState(queued=(10, 40, 500), work=(1.0, 100.0, 1.0), own_work=25.0, active_weight=2.0)
    entry, one, two = QueueEntry("a", "t"), Capacity(), Capacity(replicas=2)
    rules = AdmissionConfig(queue=100)
    assert crowding(entry, state, one, rules) == (10 + 0.5 * 40) / 100
    assert crowding(entry, state, two, rules) == (10 + 0.5 * 40) / 200
    assert crowding(entry, state, one, AdmissionConfig(queue=100, order="priority")) == 0.5
    assert crowding(replace(entry, rank=BATCH), state, two, AdmissionConfig(queue=300, order="priority")) == 550 / 600
    assert crowding(entry, state, one, AdmissionConfig(queue=1000, order="fcfs")) == 0.55
    assert crowding(entry, state, one, AdmissionConfig(queue=0, order="sjf")) == 1.0
    assert crowding(entry, QueueState(), one, AdmissionConfig(queue=0, order="sjf")) == 0.0


def test_the_value_of_a_request_is_the_sum_of_its_parts() -> None:
    typical = DecisionInput(QueueEntry("a", "t", rank=BATCH, cost=2000.0), budget_left=0.0)
    behind = QueueState(excess=2000.0)
    least = 0.075 + 0.075
    assert value_of(typical, behind) == pytest.approx(least)

    def entry(**changed: object) -> DecisionInput:
        return replace(typical, entry=replace(typical.entry, **changed))

    assert value_of(entry(weight=4.0), behind) == pytest.approx(least + 0.3 * 0.75)
    assert value_of(entry(weight=0.5), behind) == pytest.approx(least)
    assert value_of(entry(rank=STANDARD), behind) == pytest.approx(least + 0.1)
    assert value_of(entry(rank=PREMIUM), behind) == pytest.approx(least + 0.2)
    assert value_of(entry(cost=6000.0), behind) == pytest.approx(0.15 / 4 + 0.075)
    assert value_of(replace(typical, prompt_tokens=200, cached_tokens=50), behind) == pytest.approx(least + 0.025)
    assert value_of(replace(typical, prompt_tokens=200, cached_tokens=900), behind) == pytest.approx(least + 0.1)
    assert value_of(replace(typical, prompt_tokens=0, cached_tokens=1), behind) == pytest.approx(least + 0.1)
    assert value_of(replace(typical, budget_left=0.5), behind) == pytest.approx(least + 0.05)
    assert value_of(replace(typical, budget_left=7.0), behind) == pytest.approx(least + 0.1)
    assert value_of(replace(typical, budget_left=-7.0), behind) == pytest.approx(least)
    assert value_of(typical, QueueState(excess=6000.0)) == pytest.approx(0.075 + 0.15 / 4)
    assert value_of(typical, QueueState(excess=-6000.0)) == pytest.approx(0.075 + 0.15)


def test_the_share_that_is_shed_rises_from_the_threshold() -> None:
    rules = AdmissionConfig(shed_from=0.8)
    assert shed_share(0.8, 0.0, rules) == 0.0
    assert shed_share(0.9, 0.0, rules) == pytest.approx(0.5)
    assert shed_share(0.9, 0.6, rules) == pytest.approx(0.2)
    assert shed_share(3.0, 0.25, rules) == 0.75
    assert shed_share(3.0, 7.0, rules) == 0.0 and shed_share(3.0, -7.0, rules) == 1.0
    assert shed_share(3.0, 0.0, AdmissionConfig(shed_from=1.0)) == 0.0
    assert shed_share(0.5, 0.0, AdmissionConfig(shed_from=0.0)) == 0.5


def test_a_request_is_refused_from_three_quarters_of_its_patience_on() -> None:
    state = QueueState(4, 0, (0, 1, 0), (0.0, 750.0, 0.0), (100.0, 100.0, 100.0), own_work=750.0, active_weight=1.0)
    calm, capacity = AdmissionConfig(shed_from=1.0), Capacity(slots=4)
    late = decide(DecisionInput(QueueEntry("a", "t"), max_wait_s=10.0), state, capacity, calm, 0.99)
    assert late == Verdict("refuse", 7.5, "load_shed")
    early = decide(DecisionInput(QueueEntry("a", "t"), max_wait_s=10.1), state, capacity, calm, 0.0)
    assert early == Verdict("queue", 7.5)
    assert decide(DecisionInput(QueueEntry("a", "t"), max_wait_s=10.1), state, capacity, RULES, 0.0).action == "refuse"


def test_shedding_compares_the_roll_with_the_share_and_says_when_to_return() -> None:
    state = QueueState(4, 0, (0, 90, 0), (0.0, 1.0, 0.0), (1e3, 1e3, 1e3), own_work=1.0, active_weight=1.0)
    rules, capacity = AdmissionConfig(queue=100), Capacity(slots=4)
    asking = DecisionInput(QueueEntry("a", "t"))
    share = shed_share(0.9, value_of(asking, state), rules)
    assert 0.0 < share < 1.0
    assert decide(asking, state, capacity, rules, share) == Verdict("queue", 0.001)
    shed = decide(asking, state, capacity, rules, share - 1e-9)
    assert shed == Verdict("refuse", 1.0, "load_shed"), "no sooner than in a second"
    slow = replace(state, work=(0.0, 5e3, 0.0), own_work=5e3)
    assert decide(asking, slow, capacity, rules, 0.0) == Verdict("refuse", 5.0, "load_shed")


def test_saturation_counts_at_least_one_replica() -> None:
    rules = AdmissionConfig(downgrade_depth=2.0)
    assert saturated(QueueState(queued=(1, 1, 1)), Capacity(replicas=0), rules)
    assert not saturated(QueueState(queued=(0, 1, 1)), Capacity(replicas=0), rules)


def test_what_is_assumed_of_a_request_when_nothing_is_said() -> None:
    entry = QueueEntry("a", "t")
    assert DecisionInput(entry) == DecisionInput(entry, 1, 0, 1.0, 10.0)
    assert Verdict("admit") == Verdict("admit", 0.0, None)
