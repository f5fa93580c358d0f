"""The figures of headroom one by one, from histories that are small enough to compute by hand."""

from __future__ import annotations

from dataclasses import replace
from math import inf, sqrt
from typing import Any

import numpy as np
import pytest

from penstock.planning.headroom import (
    Estimate,
    FleetSize,
    FullDate,
    Headroom,
    LoadPoint,
    RequestMix,
    ServerPlan,
    arrivals_trend,
    full_date,
    mean,
    plan_server,
    replica_capacity,
    request_mix,
)
from penstock.planning.trend import HOUR, Trend, t_quantile

NOW = 1_800_000_000.0
SIZE = FleetSize(replicas=1, slots=40)


def point(tokens: float, speed: float, *, at: float = 0.0, seconds: float = 60.0, **other: float) -> LoadPoint:
    """A replica makes `tokens` per second, and each sequence `speed` of them."""
    values = {"output_tokens": tokens, "token_time": 1 / speed, "running": tokens / speed, "replicas": 1.0}
    return LoadPoint(at, seconds, **(values | other))


def capacity(points: list[LoadPoint], size: FleetSize = SIZE) -> Any:
    found = replica_capacity(points, size)
    assert found is not None
    return found


def test_what_is_not_given_is_nothing() -> None:
    nothing = LoadPoint(5.0, 60.0)
    assert nothing == LoadPoint(5.0, 60.0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    assert FleetSize(2, 40) == FleetSize(2, 40, 0, None, False)
    assert FullDate("unknown") == FullDate("unknown", None, False, 0.0, 0.0, None, None, None)
    assert Estimate(1, 2, 3).times(4) == Estimate(4, 8, 12)


def test_a_mean_is_weighted_by_time_and_that_of_token_times_by_tokens() -> None:
    points = [
        LoadPoint(7.0, 60.0, 1, 0.5, 30, 10, 0.1, 1, 4, 0.2, 1),
        LoadPoint(67.0, 180.0, 5, 2.5, 70, 30, 0.2, 5, 8, 0.6, 3),
        LoadPoint(247.0, 60.0, 1, 0.5, 30, 10, 0.0, 1, 4, 0.2, 1),
    ]
    time = (0.1 * 10 * 60 + 0.2 * 30 * 180) / (10 * 60 + 30 * 180)
    expected = LoadPoint(7.0, 300.0, 3.4, 1.7, 54, 22, time, 3.4, 6.4, 0.44, 2.2)
    for name in LoadPoint.__slots__:
        assert getattr(mean(points), name) == pytest.approx(getattr(expected, name)), name
    assert mean([]) == LoadPoint(0.0, 0.0)
    assert mean([LoadPoint(3.0, 60.0, output_tokens=5.0)]).token_time == 0.0
    assert mean([LoadPoint(3.0, 60.0)]).at == 3.0


def test_the_mix_is_tokens_over_admitted_requests() -> None:
    assert request_mix([LoadPoint(0, 60, 5.0, 1.0, 800, 200)]) == RequestMix(200, 50)
    assert request_mix([LoadPoint(0, 60, 0.5, 0.1, 80, 0.2)]) == RequestMix(pytest.approx(200), pytest.approx(0.5))
    assert request_mix([LoadPoint(0, 60, 1.0, 1.0, 80, 20)]) is None, "nobody was admitted"
    assert request_mix([LoadPoint(0, 60, 1.0, 0.0, 80, 0)]) is None, "nothing was generated"
    assert request_mix([LoadPoint(0, 60, 0.5, 1.0, 80, 20)]) is None


# Five minutes on a line: a sequence makes 20 tokens per second less 1 for every 50 that the replica makes.
LINE = [point(100.0 * n, 20.0 - 2.0 * n, seconds=60.0 * n) for n in (1, 2, 3, 4, 5)]


def test_a_line_through_minutes_gives_the_rate_of_full_slots() -> None:
    # n (20 - x / 50) = x for n = 40 gives x = 40 * 20 / (1 + 40 / 50).
    line = [replace(one, running=0.0) for one in LINE]
    found = capacity(line)
    assert found.source == "fitted" and found.sequences == 40
    expected = 800 / 1.8
    assert found.output_tokens.likely == pytest.approx(max(expected, 500))
    wide = capacity(line, FleetSize(1, 100))
    assert wide.output_tokens.likely == pytest.approx(2000 / 3) and wide.token_time == pytest.approx(100 / (2000 / 3))
    assert wide.first_full == "slots"


def test_fewer_than_five_minutes_or_a_steady_load_show_no_slowing() -> None:
    for points in (LINE[:4], [point(100.0 + n, 20.0 - n) for n in range(5)]):
        quiet = [replace(one, running=0.0) for one in points]
        seen = max(one.output_tokens for one in quiet)
        speed = sum(one.seconds / one.token_time for one in quiet) / sum(one.seconds for one in quiet)
        found = capacity(quiet, FleetSize(1, 100))
        assert found.source == "extrapolated" and found.output_tokens.low == seen
        assert found.output_tokens.high == pytest.approx(100 * speed)
        assert found.output_tokens.likely == pytest.approx(sqrt(seen * 100 * speed))


def test_the_spread_that_is_needed_is_a_twentieth() -> None:
    for share, source in ((0.9, "extrapolated"), (1.1, "fitted")):
        rates = [1000 + share * 50 * sign for sign in (-1, 1, -1, 1, -1, 1)]
        points = [point(rate, 100 - rate / 25, running=0.0) for rate in rates]
        assert capacity(points).source == source


def test_the_interval_of_the_slope_is_that_of_least_squares() -> None:
    rates = np.array([100.0, 200.0, 300.0, 400.0, 500.0, 600.0])
    speeds = 20.0 - rates / 50 + np.array([0.3, -0.5, 0.2, 0.4, -0.6, 0.2])
    weights = np.array([60.0, 120.0, 60.0, 30.0, 60.0, 90.0])
    points = [
        point(rate, speed, seconds=weight, running=0.0)
        for rate, speed, weight in zip(rates, speeds, weights, strict=True)
    ]
    x, y = (np.average(values, weights=weights) for values in (rates, speeds))
    across = (weights * (rates - x) ** 2).sum()
    slope = (weights * (rates - x) * (speeds - y)).sum() / across
    rest = (weights * (speeds - y - slope * (rates - x)) ** 2).sum()
    error = t_quantile(4) * sqrt(rest / 4 / across)
    assert 0 < error < -slope

    def on_line(falls: float) -> float:
        return 100 * (y + falls * x) / (1 + 100 * falls)

    found = capacity(points, FleetSize(1, 100)).output_tokens
    assert found.likely == pytest.approx(on_line(-slope), rel=1e-9)
    assert found.low == pytest.approx(on_line(-slope + error), rel=1e-9)
    assert found.high == pytest.approx(on_line(-slope - error), rel=1e-9)


def test_sequences_that_get_faster_with_load_are_taken_for_as_fast() -> None:
    points = [point(100.0 * n, 10.0 + n, running=0.0) for n in (1, 2, 3, 4, 5)]
    found = capacity(points)
    assert found.source == "fitted" and found.output_tokens.low == pytest.approx(40 * 13, rel=1e-6)
    assert found.output_tokens.high == pytest.approx(40 * 13, rel=1e-6)


def test_a_slope_that_noise_explains_leaves_both_ends() -> None:
    points = [point(100.0 * n, 13.0 + (n % 2) - 0.01 * n, running=0.0) for n in (1, 2, 3, 4, 5, 6)]
    found = capacity(points, FleetSize(1, 100))
    assert found.source == "extrapolated" and found.first_full == "slots"
    low, high = found.output_tokens.low, 100 * np.mean([1 / one.token_time for one in points])
    assert found.output_tokens.high == pytest.approx(high) and 1000 < low < 1100
    assert found.output_tokens.likely == pytest.approx(sqrt(low * high))
    assert capacity(points).output_tokens.high == 600, "40 sequences as fast as the mean: what was seen is more"


@pytest.mark.parametrize(("slots", "first_full"), [(199, "slots"), (201, "compute"), (1000, "compute")])
def test_four_fifths_of_the_speed_limit_are_compute(slots: int, first_full: str) -> None:
    """With 1 less for every 50, 200 sequences make four fifths of what infinitely many would."""
    assert capacity([replace(one, running=0.0) for one in LINE], FleetSize(1, slots)).first_full == first_full


@pytest.mark.parametrize(("running", "source"), [(35.9, "fitted"), (36.0, "measured"), (40.0, "measured")])
def test_nine_tenths_of_the_sequences_are_full(running: float, source: str) -> None:
    points = [replace(one, running=0.0) for one in LINE[:4]] + [replace(LINE[4], running=running)]
    found = capacity(points)
    assert found.source == source
    if source == "measured":
        assert found.output_tokens == Estimate(pytest.approx(450), 500, pytest.approx(550))
        assert found.token_time == 40 / 500


def test_full_minutes_of_several_replicas() -> None:
    points = [point(800.0, 5.0, running=running, replicas=2.0) for running in (71.9, 72.0, 73.0)]
    points[2] = replace(points[2], output_tokens=900.0)
    assert capacity(points).output_tokens.likely == (400 + 450) / 2


@pytest.mark.parametrize(("count", "low", "high"), [(4, 90.0, 103 * 1.1), (5, 100.0, 104.0), (39, 101.0, 137.0)])
def test_the_range_of_measured_minutes_is_nine_tenths_of_them(count: int, low: float, high: float) -> None:
    points = [point(100.0 + (n * 7) % count, 5.0, running=40.0) for n in range(count)]
    found = capacity(points).output_tokens
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.likely == pytest.approx(100 + (count - 1) / 2)


def test_idle_minutes_say_nothing() -> None:
    quiet = [replace(one, running=0.0) for one in LINE]
    idle = [replace(quiet[0], **{name: 0.0}) for name in ("token_time", "output_tokens", "replicas")]
    assert replica_capacity(idle, SIZE) is None
    assert capacity(idle + quiet) == capacity(quiet)
    slow = [replace(one, output_tokens=one.output_tokens / 1000, token_time=one.token_time * 1000) for one in quiet]
    assert capacity(slow, FleetSize(1, 100)).output_tokens.likely == pytest.approx(2 / 3), "below one token per second"


@pytest.mark.parametrize(
    ("slots", "kv_tokens", "kv_use", "sequences", "first_full"),
    [
        (40, 10_000, 0.5, 20.0, "kv_cache"),  # 10 sequences hold half: 20 fit
        (20, 10_000, 0.5, 20.0, "slots"),
        (21, 10_000, 0.5, 20.0, "kv_cache"),
        (0, 10_000, 0.5, 20.0, "kv_cache"),
        (40, 0, 0.5, 40.0, "slots"),
        (40, 10_000, 0.0, 40.0, "slots"),
        (40, 10, 0.5, 20.0, "kv_cache"),  # half a token each
    ],
)  # fmt: skip
def test_sequences_are_limited_by_slots_or_by_the_cache(
    slots: int, kv_tokens: int, kv_use: float, sequences: float, first_full: str
) -> None:
    points = [point(100.0, 10.0, kv_use=kv_use), point(200.0, 20.0, kv_use=kv_use)]
    found = capacity(points, FleetSize(1, slots, kv_tokens))
    assert (found.sequences, found.first_full) == (pytest.approx(sequences), first_full)
    several = [
        replace(one, running=3 * one.running, output_tokens=3 * one.output_tokens, replicas=3.0) for one in points
    ]
    assert capacity(several, FleetSize(3, slots, kv_tokens)).sequences == pytest.approx(sequences)


def test_a_replica_of_unknown_size_has_no_capacity() -> None:
    assert replica_capacity([point(100.0, 10.0)], FleetSize(1, 0)) is None
    assert replica_capacity([point(100.0, 10.0, running=0.0, kv_use=0.5)], FleetSize(1, 0, 10_000)) is None
    few = [point(100.0, 10.0, running=0.5, kv_use=0.5)]
    assert capacity(few, FleetSize(1, 0, 10_000)).sequences == 1.0


def test_the_trend_is_that_of_the_middle_of_intervals_and_hours_come_first() -> None:
    minutes = [LoadPoint(60.0 * n, 60.0, requests=n) for n in range(12)]
    hours = [LoadPoint(3600.0 * n, 3600.0, requests=7 * n) for n in range(12)]
    found = arrivals_trend(minutes, hours)
    assert found is not None and found.slope == pytest.approx(7 / 3600) and found.last == 11.5 * 3600
    found = arrivals_trend(minutes, hours[:9])
    assert found is not None and found.slope == pytest.approx(1 / 60) and found.last == 11.5 * 60
    assert arrivals_trend(minutes[:9], hours[:9]) is None


GROWING = Trend(NOW, 4.0, 1 / HOUR, 0.5 / HOUR, 2 / HOUR, (), NOW, 5 * HOUR)
"""Four requests per second, and one more every hour (a half to two); trusted for ten hours."""
ROOM = Headroom(
    0.5, 400.0, 4.0, Estimate(600, 800, 1000), Estimate(6, 8, 10), Estimate(200, 400, 600), Estimate(2, 4, 6), "slots",
    None, 0.05, "fitted",
)  # fmt: skip


def test_the_date_is_where_the_trend_meets_the_capacity() -> None:
    found = full_date(GROWING, ROOM)
    assert (found.outlook, found.seasonal, found.observed_s, found.horizon_s) == (
        "filling", False, 5 * HOUR, 10 * HOUR,
    )  # fmt: skip
    assert found.growth_per_hour == Estimate(pytest.approx(0.5), pytest.approx(1.0), pytest.approx(2.0))
    assert (found.in_s, found.earliest_s) == (pytest.approx(4 * HOUR), pytest.approx(1 * HOUR))
    assert found.latest_s is None, "twelve hours, of ten that the trend is trusted for"
    sure = full_date(GROWING, replace(ROOM, capacity_requests=Estimate(7, 8, 8.5)))
    assert (sure.earliest_s, sure.latest_s) == (pytest.approx(1.5 * HOUR), pytest.approx(9 * HOUR))


def test_a_date_beyond_the_horizon_or_of_a_load_that_does_not_grow() -> None:
    far = full_date(GROWING, replace(ROOM, capacity_requests=Estimate(12, 20, 30)))
    assert (far.outlook, far.in_s, far.earliest_s) == ("not_within_horizon", None, pytest.approx(4 * HOUR))
    unsure = replace(GROWING, slope_low=-0.5 / HOUR)
    still = full_date(unsure, ROOM)
    assert (still.outlook, still.in_s, still.earliest_s, still.latest_s) == ("not_growing", None, None, None)
    daily = replace(unsure, season=(1.0,) * 24)
    assert full_date(daily, ROOM).outlook == "filling" and full_date(daily, ROOM).seasonal
    assert full_date(replace(daily, slope=0.0), ROOM).outlook == "not_growing", "no day reaches it"


def test_a_date_without_what_it_takes() -> None:
    assert full_date(None, ROOM) == FullDate("unknown")
    assert full_date(GROWING, None).outlook == "unknown" and full_date(GROWING, None).in_s is None
    assert full_date(replace(GROWING, slope_low=0.0), None).outlook == "not_growing"
    assert full_date(GROWING, replace(ROOM, capacity_requests=None)).outlook == "not_within_horizon"


@pytest.mark.parametrize(("utilisation", "full"), [(0.99, False), (1.0, True), (1.5, True)])
def test_full_is_full_now(utilisation: float, full: bool) -> None:
    found = full_date(GROWING, replace(ROOM, utilisation=utilisation))
    assert (found == FullDate("full", in_s=0.0, earliest_s=0.0, latest_s=0.0)) == full


def served(load: float, *, seconds_ago: float = 0.0, admitted: float = 1.0, **other: float) -> LoadPoint:
    """A minute that ended `seconds_ago`: one request per second and replica brings 300 and 100 tokens."""
    values = {"requests": load / 100, "prompt_tokens": 3 * load, "refused": (1 - admitted) * load / 100}
    return point(load, 20.0, at=NOW - seconds_ago - 60.0, **(values | other))


def full_minute(seconds_ago: float = 3000.0) -> LoadPoint:
    """A minute in which one replica was full, with 800 tokens per second."""
    return served(800.0, seconds_ago=seconds_ago, running=40.0)


def planned(*minutes: LoadPoint, hours: tuple[LoadPoint, ...] = (), **size: Any) -> ServerPlan:
    return plan_server(minutes, hours, FleetSize(**({"replicas": 1, "slots": 40, "price_per_hour": 3.6} | size)), NOW)


def test_the_present_is_the_last_two_minutes_and_the_mix_the_last_hour() -> None:
    old = served(700.0, seconds_ago=3600.0, prompt_tokens=9e9)
    found = planned(old, full_minute(), served(500.0, seconds_ago=120.0), served(100.0, seconds_ago=119.5), served(300))
    assert found.headroom is not None and found.headroom.output_tokens == pytest.approx(200)
    assert found.mix is not None and found.mix.prompt_tokens == pytest.approx(300)
    almost = served(700.0, seconds_ago=3599.0, prompt_tokens=9e9)
    both = planned(almost, full_minute()).mix
    assert both is not None and both.prompt_tokens > 1e6


def test_hours_help_out_where_minutes_say_nothing() -> None:
    hours = (replace(full_minute(40_000.0), seconds=3600.0, prompt_tokens=800.0),)
    found = planned(hours=hours)
    assert found.mix == RequestMix(100.0, 100.0)
    assert found.headroom is not None and found.headroom.capacity_output_tokens.likely == 800
    assert found.headroom.utilisation == 0 and found.headroom.token_time is None
    minutes = planned(full_minute(), hours=(replace(hours[0], output_tokens=1600.0),))
    assert minutes.headroom is not None and minutes.headroom.capacity_output_tokens.likely == 800


def test_headroom_is_capacity_without_demand() -> None:
    found = planned(full_minute(), served(150.0, running=30.0), replicas=2)
    room = found.headroom
    assert room is not None and room.source == "measured" and room.first_full == "slots"
    assert room.capacity_output_tokens == Estimate(pytest.approx(1440), 1600, pytest.approx(1760))
    assert room.capacity_requests == Estimate(pytest.approx(14.4), pytest.approx(16), pytest.approx(17.6))
    assert room.free_output_tokens == Estimate(pytest.approx(1290), pytest.approx(1450), pytest.approx(1610))
    assert room.free_requests == Estimate(pytest.approx(12.9), pytest.approx(14.5), pytest.approx(16.1))
    assert (room.utilisation, room.output_tokens, room.requests) == pytest.approx((150 / 1600, 150, 1.5))
    assert room.token_time == pytest.approx(0.05) and room.token_time_full == 40 / 800


def test_refused_requests_would_have_needed_as_much() -> None:
    room = planned(full_minute(), served(40.0, requests=0.5, refused=0.1)).headroom
    assert room is not None and room.utilisation == pytest.approx(50 / 800)
    beyond = planned(full_minute(), served(790.0, requests=16.0, refused=8.0)).headroom
    assert beyond is not None and beyond.free_output_tokens == Estimate(0, 0, 0)
    none = planned(full_minute(), served(40.0, requests=0.5, refused=0.5)).headroom
    assert none is not None and none.utilisation == pytest.approx(40 / 800), "those of before are still served"


def test_without_a_mix_there_are_no_figures_in_requests() -> None:
    old = replace(full_minute(4000.0))
    found = planned(old)
    assert found.mix is None and found.headroom is not None
    assert found.headroom.capacity_requests is None and found.headroom.free_requests is None
    assert found.next_replica.adds_requests is None and found.next_replica.adds_output_tokens is not None


def test_costs() -> None:
    found = planned(full_minute(), served(0.5, running=0.1), replicas=2).cost
    assert found.per_hour == 7.2
    assert found.per_million_output_tokens == pytest.approx(7.2 / (0.5 * 3600) * 1e6, rel=1e-9)
    assert found.per_million_tokens == pytest.approx(7.2 / (2 * 3600) * 1e6, rel=1e-9)
    assert found.per_million_tokens_full == pytest.approx(7.2 / (1600 * 4 * 3600) * 1e6, rel=1e-9)
    idle = planned(full_minute()).cost
    assert (idle.per_hour, idle.per_million_tokens, idle.per_million_output_tokens) == (3.6, None, None)
    assert idle.per_million_tokens_full is None
    assert planned(served(10.0), slots=0).cost.per_million_tokens_full is None
    assert planned(full_minute(), price_per_hour=None).cost.per_hour is None


@pytest.mark.parametrize(
    ("load", "replicas", "spare"),
    [
        (0.0, 4, 3),
        (559.9, 4, 3),
        (560.0, 4, 3),
        (560.1, 4, 2),
        (1119.9, 4, 2),
        (1121.0, 4, 1),
        (2300.0, 4, 0),
        (3000.0, 4, 0),
        (1.0, 1, 0),
    ],
)
def test_the_rest_is_at_most_seventy_percent_full(load: float, replicas: int, spare: int) -> None:
    minutes = (full_minute(), served(load, running=4.0, replicas=float(replicas)))
    found = planned(*minutes, replicas=replicas).next_replica
    assert found.spare_replicas == spare
    assert found.utilisation == pytest.approx(load / 800 / (replicas + 1))


def test_one_more_replica() -> None:
    found = planned(full_minute(), served(400.0, running=8.0)).next_replica
    assert found.adds_output_tokens == Estimate(pytest.approx(720), 800, pytest.approx(880))
    assert found.adds_requests == Estimate(pytest.approx(7.2), pytest.approx(8), pytest.approx(8.8))
    assert (found.per_hour, found.per_month, found.shares_machine) == (3.6, pytest.approx(2628.0), False)
    assert found.utilisation == pytest.approx(0.25)
    shared = planned(full_minute(), served(400.0, running=8.0), shares_machine=True).next_replica
    assert shared.adds_output_tokens == Estimate(0.0, 0.0, pytest.approx(880)) and shared.shares_machine
    assert shared.utilisation == pytest.approx(0.5)


def test_no_replica_at_all() -> None:
    found = planned(full_minute(), replicas=0)
    assert found.headroom is None and found.cost.per_hour == 0
    assert found.next_replica.adds_output_tokens is not None and found.next_replica.utilisation is None
    assert found.next_replica.spare_replicas == 0
    nothing = planned(shares_machine=True).next_replica
    assert nothing.adds_output_tokens is None and nothing.adds_requests is None and nothing.full.outlook == "unknown"
    assert nothing.spare_replicas == 0 and planned(price_per_hour=None).next_replica.per_month is None


def test_one_more_replica_is_full_later() -> None:
    """Arrivals grow from 4 by 2 per hour; one replica takes 8 requests per second, two take 16."""
    minutes = [served(400.0 + 200.0 * n / 60, seconds_ago=60.0 * (59 - n), running=4.0) for n in range(60)]
    minutes[10] = replace(minutes[10], running=40.0, output_tokens=800.0)
    found = planned(*minutes)
    assert found.full.outlook == "filling" and found.full.in_s is not None
    # From 5.97 at the middle of the last minute, at 2 per hour, to what the mix makes of 800 tokens per second.
    most = found.headroom.capacity_requests.likely  # type: ignore[union-attr]
    assert found.full.in_s == pytest.approx((most - minutes[-1].requests) / 2 * HOUR, rel=1e-6)
    assert found.next_replica.full.outlook == "not_within_horizon"
    assert found.next_replica.full.growth_per_hour is not None
    assert found.next_replica.full.growth_per_hour.likely == pytest.approx(2.0)
    assert inf > found.next_replica.full.horizon_s == pytest.approx(2 * 59 * 60)
