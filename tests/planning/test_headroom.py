"""Headroom, the date when a model is full, and the price of the next replica, from what a server measured."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

from penstock.planning.headroom import FleetSize, LoadPoint, ServerPlan, plan_server, replica_capacity, request_mix

NOW = 1_800_000_000.0
A, B = 0.01, 0.001
"""Seconds per token of an engine that reads its weights in 10 ms and needs 1 ms more per sequence."""


def minute(
    index: int, sequences: float, *, replicas: int = 1, requests: float | None = None, **other: float
) -> LoadPoint:
    """A minute in which `sequences` ran on each replica; a request takes 100 tokens for 300 of prompt."""
    time = A + B * sequences
    tokens = replicas * sequences / time
    values = {
        "requests": tokens / 100 if requests is None else requests,
        "prompt_tokens": 3 * tokens,
        "output_tokens": tokens,
        "token_time": time if sequences else 0.0,
        "running": replicas * sequences,
        "kv_use": 0.01 * sequences,
        "replicas": float(replicas),
    }
    return LoadPoint(NOW + 60 * (index - 60), 60.0, **(values | other))


def hour_of(loads: Sequence[float], **other: float) -> list[LoadPoint]:
    return [minute(60 - len(loads) + i, load, **other) for i, load in enumerate(loads)]


def plan(points: Sequence[LoadPoint], **size: object) -> ServerPlan:
    defaults: dict[str, object] = {"replicas": 1, "slots": 40, "kv_tokens": 100_000, "price_per_hour": 3.6}
    return plan_server(points, (), FleetSize(**(defaults | size)), NOW)  # type: ignore[arg-type]


def test_capacity_is_fitted_from_minutes_at_different_loads() -> None:
    found = plan(hour_of([2, 4, 6, 8, 10, 12] * 10))
    assert found.headroom is not None
    # 40 sequences at 10 + 40 ms per token: 800 tokens per second, 8 requests per second.
    assert found.headroom.source == "fitted" and found.headroom.first_full == "slots"
    assert found.headroom.capacity_output_tokens.likely == pytest.approx(800)
    assert found.headroom.capacity_requests is not None
    assert found.headroom.capacity_requests.likely == pytest.approx(8)
    assert found.headroom.token_time_full == pytest.approx(0.05)
    load = sum(n / (A + B * n) for n in (10, 12)) / 2
    assert found.headroom.output_tokens == pytest.approx(load)
    assert found.headroom.free_output_tokens.likely == pytest.approx(800 - load)
    assert found.headroom.utilisation == pytest.approx(load / 800)
    assert found.mix is not None and (found.mix.prompt_tokens, found.mix.output_tokens) == pytest.approx((300, 100))


def test_the_kv_cache_is_full_first_when_sequences_are_long() -> None:
    points = hour_of([2, 4, 6, 8] * 15)
    points = [dataclasses.replace(point, kv_use=0.05 * point.running) for point in points]
    found = plan(points)
    assert found.headroom is not None and found.headroom.first_full == "kv_cache"
    assert found.headroom.capacity_output_tokens.likely == pytest.approx(20 / (A + B * 20))


def test_a_machine_without_free_compute_is_full_before_its_slots_are() -> None:
    found = plan(hour_of([2, 4, 6, 8, 10, 12] * 10), slots=1000, kv_tokens=0)
    assert found.headroom is not None and found.headroom.first_full == "compute"
    assert found.headroom.capacity_output_tokens.likely == pytest.approx(1000 / (A + B * 1000))


def test_a_full_minute_is_a_measurement() -> None:
    found = plan(hour_of([10] * 50 + [38, 40, 39] + [10] * 7))
    assert found.headroom is not None and found.headroom.source == "measured"
    capacity = found.headroom.capacity_output_tokens
    assert capacity.likely == pytest.approx(793, rel=0.01)
    assert capacity.low == pytest.approx(0.9 * 38 / (A + B * 38)), "three minutes alone could be lucky"
    many = plan(hour_of([10] * 40 + [40] * 20)).headroom
    assert many is not None and many.capacity_output_tokens.low == pytest.approx(800)


def test_one_load_only_gives_a_wide_range() -> None:
    found = plan(hour_of([10] * 60))
    assert found.headroom is not None and found.headroom.source == "extrapolated"
    capacity = found.headroom.capacity_output_tokens
    assert (capacity.low, capacity.high) == pytest.approx((500, 2000))
    assert capacity.likely == pytest.approx(1000)


def test_the_range_holds_the_truth_on_a_disturbed_machine() -> None:
    """Other work on the machine makes some minutes slow, whatever the load: that is not taken for a full engine."""
    inside = starved = 0
    for seed in range(100):
        rng = random.Random(seed)
        points = []
        for index in range(60):
            calm = minute(index, rng.uniform(1, 12))
            slower = rng.uniform(0.8, 1.25)
            points.append(dataclasses.replace(calm, token_time=calm.token_time * slower))
        found = replica_capacity(points, FleetSize(1, 40))
        assert found is not None
        inside += found.output_tokens.low <= 800 <= found.output_tokens.high
        starved += found.output_tokens.likely < 400
    assert inside >= 85 and starved == 0


def test_a_lucky_minute_is_likely_but_not_certain() -> None:
    points = hour_of([2, 4, 6, 8, 10, 12] * 10)
    points[5] = dataclasses.replace(points[5], output_tokens=900.0)
    found = replica_capacity(points, FleetSize(1, 40))
    assert found is not None and found.output_tokens.likely == 900.0 and found.output_tokens.low < 880


def test_an_idle_server_has_no_figures() -> None:
    for points in ([], hour_of([0] * 60)):
        found = plan(points)
        assert found.headroom is None and found.mix is None
        assert found.cost.per_hour == 3.6 and found.cost.per_million_tokens is None
        assert found.next_replica.adds_output_tokens is None and found.next_replica.per_hour == 3.6
        assert found.full.outlook in ("unknown", "not_growing")
    assert plan(hour_of([2, 4] * 30), slots=0, kv_tokens=0).headroom is None, "an engine that does not tell its size"
    assert plan(hour_of([2, 4] * 30), replicas=0).headroom is None


def at_rate(index: int, requests: float) -> LoadPoint:
    """A minute with this many requests of 100 tokens per second."""
    return minute(index, 100 * requests * A / (1 - 100 * requests * B))


def test_growth_leads_to_a_date_and_the_next_replica_to_a_later_one() -> None:
    found = plan([at_rate(i, 3 + 2 * (i + 0.5) / 60) for i in range(60)])  # from 3 to 5 in an hour; 8 is full
    assert found.headroom is not None and found.headroom.capacity_requests is not None
    assert found.headroom.capacity_requests.likely == pytest.approx(8)
    assert found.full.outlook == "filling" and not found.full.seasonal
    assert found.full.growth_per_hour is not None and found.full.growth_per_hour.likely == pytest.approx(2.0)
    assert found.full.in_s == pytest.approx(1.5 * 3600, abs=60)
    assert found.full.horizon_s == pytest.approx(2 * 59 * 60)
    assert found.next_replica.full.outlook == "not_within_horizon", "with two replicas it would take 5.5 hours"
    assert found.next_replica.adds_requests is not None and found.next_replica.adds_requests.likely == pytest.approx(8)


def test_an_uncertain_capacity_makes_the_date_uncertain() -> None:
    rng = random.Random(7)
    points = [at_rate(i, 3 + 2 * (i + 0.5) / 60) for i in range(60)]
    points = [dataclasses.replace(point, token_time=point.token_time * rng.uniform(0.9, 1.1)) for point in points]
    found = plan(points)
    assert found.full.outlook in ("filling", "not_within_horizon") and found.full.earliest_s is not None
    assert found.headroom is not None and found.headroom.capacity_requests is not None
    capacity = found.headroom.capacity_requests
    assert capacity.low < capacity.likely < capacity.high
    assert found.full.earliest_s == pytest.approx((capacity.low - 5) / 2 * 3600, abs=90)


def test_a_steady_load_is_not_growing() -> None:
    found = plan(hour_of([2, 4, 6, 8, 10, 12] * 10))
    assert found.full.outlook == "not_growing" and found.full.in_s is None


def test_refused_requests_count_as_demand() -> None:
    tokens = 40 / (A + B * 40)
    found = plan(hour_of([40] * 60, requests=tokens / 100 * 2, refused=tokens / 100))
    assert found.headroom is not None and found.headroom.utilisation == pytest.approx(2.0)
    assert found.full.outlook == "full" and found.full.in_s == 0.0
    assert found.headroom.free_output_tokens.high == 0.0
    assert found.next_replica.full.outlook == "full", "two replicas are just full"
    assert found.next_replica.utilisation == pytest.approx(1.0)


def test_a_wave_that_has_just_arrived_counts() -> None:
    tokens = 40 / (A + B * 40)
    found = plan(hour_of([10] * 58) + hour_of([40, 40], requests=tokens / 100 * 1.5, refused=tokens / 100 * 0.5))
    assert found.full.outlook == "full"


def test_costs_at_the_present_and_at_full_load() -> None:
    # 40 of 1,000 sequences: 500 output and 1,500 prompt tokens per second for 3.60 dollars per hour.
    found = plan(hour_of([10] * 54 + [40] + [10] * 5))
    assert found.cost.per_hour == pytest.approx(3.6)
    assert found.cost.per_million_output_tokens == pytest.approx(3.6 / (500 * 3600) * 1e6)  # 2 dollars
    assert found.cost.per_million_tokens == pytest.approx(0.5)
    assert found.cost.per_million_tokens_full == pytest.approx(0.5 * 500 / 800)
    assert found.next_replica.per_month == pytest.approx(3.6 * 730)
    without = plan(hour_of([10] * 60), price_per_hour=None)
    assert without.cost.per_hour is None and without.next_replica.per_month is None


def test_replicas_that_could_be_given_up() -> None:
    points = hour_of([10] * 54 + [40] + [10] * 5, replicas=4)
    found = plan(points, replicas=4)
    # 4 x 500 of 4 x 800 tokens per second: 2.5 replicas' worth, which is at most 70% of 4.
    assert found.next_replica.spare_replicas == 0
    assert plan(hour_of([2] * 54 + [40] + [2] * 5, replicas=4), replicas=4).next_replica.spare_replicas == 2
    assert plan(hour_of([0.01] * 54 + [40] + [0.01] * 5), replicas=1).next_replica.spare_replicas == 0


def test_a_replica_on_the_same_cores_promises_nothing() -> None:
    found = plan(hour_of([10] * 54 + [40] + [10] * 5), shares_machine=True)
    adds = found.next_replica.adds_output_tokens
    assert adds is not None and adds.low == adds.likely == 0.0 and adds.high > 0
    assert found.headroom is not None and found.next_replica.utilisation == pytest.approx(found.headroom.utilisation)


def test_capacity_is_per_replica_whatever_their_number_was() -> None:
    points = hour_of([2, 6] * 15, replicas=1) + hour_of([4, 12] * 15, replicas=3)
    size = FleetSize(replicas=3, slots=40, kv_tokens=0)
    found = replica_capacity(points, size)
    assert found is not None and found.output_tokens.likely == pytest.approx(800)


def test_the_mix_needs_admitted_requests() -> None:
    assert request_mix([]) is None
    assert request_mix([LoadPoint(NOW, 60, requests=2, refused=2)]) is None


def test_hours_take_over_once_they_show_days() -> None:
    hours = [LoadPoint(NOW - 3600 * (72 - i), 3600.0, requests=5.0) for i in range(72)]
    minutes = hour_of([2, 4, 6, 8, 10, 12] * 10)
    found = plan_server(minutes, hours, FleetSize(1, 40), NOW)
    assert found.full.seasonal and found.full.observed_s == pytest.approx(71 * 3600)
