"""How much more load a running model can take, when it will be full, and what the next replica adds and costs.

Pure functions of what a server has measured. `n` sequences that run together in one replica need `a + b n` seconds per
output token each (the weights are read once per step, the rest grows with the batch), so a replica makes
`n / (a + b n)` tokens per second; that curve is fitted to the server's own minutes. The most sequences are those that
fit its slots and its KV cache. Everything holds for the present mix of requests. What was not measured is None: an idle
server has no capacity figure, and a load that does not grow has no date.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from penstock.planning.trend import HOUR, Crossing, Sample, Trend, crossing, fit_trend, t_quantile

Resource = Literal["slots", "kv_cache", "compute"]
Source = Literal["measured", "fitted", "extrapolated"]
Outlook = Literal["full", "filling", "not_within_horizon", "not_growing", "unknown"]

NOW_S = 120.0
"""How much of the newest history counts as the present load."""
MIX_S = HOUR
"""How much of it says what requests are like."""
FULL_SHARE = 0.9
"""Mean share of the most sequences from which a minute counts as one at full load."""
SPARE_SHARE = 0.7
"""Utilisation that must not be exceeded after giving up a replica."""
COMPUTE_SHARE = 0.8
"""Share of the speed limit `1 / b` from which further sequences no longer help."""
LEAST_SPREAD = 0.05
LEAST_MINUTES = 5
"""Relative spread of the load, and minutes, below which nothing is said about how it slows sequences."""
FEW_MARGIN = 0.1
"""Share by which the range of fewer full minutes is widened."""
MILLION = 1e6
MONTH_H = 730.0
"""Hours of a month."""


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """What one model did in an interval of time: rates per second, and means of what was sampled."""

    at: float
    """The beginning, in seconds since 1970."""
    seconds: float
    requests: float = 0.0
    """Requests that arrived, refused ones included."""
    refused: float = 0.0
    """Requests refused for lack of capacity."""
    prompt_tokens: float = 0.0
    """Prompt tokens processed, cached ones included."""
    output_tokens: float = 0.0
    token_time: float = 0.0
    """Seconds that a sequence runs per output token, prefill included; 0: no request ended."""
    running: float = 0.0
    waiting: float = 0.0
    """Requests waiting in gateway and engines."""
    kv_use: float = 0.0
    """Share of the KV cache in use, 0 to 1."""
    replicas: float = 0.0
    """Engines that accept requests."""


@dataclass(frozen=True, slots=True)
class FleetSize:
    """The replicas of one model at present."""

    replicas: int
    slots: int
    """Sequences that one replica runs at a time; 0: not known."""
    kv_tokens: int = 0
    """Tokens that fit the KV cache of one replica; 0: not known."""
    price_per_hour: float | None = None
    """Dollars per hour of one replica's hardware; None: not known."""
    shares_machine: bool = False
    """Whether a further replica runs on the same cores, and so takes speed from the others."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 90% interval."""

    low: float
    likely: float
    high: float

    def times(self, factor: float) -> Estimate:
        return Estimate(self.low * factor, self.likely * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class ReplicaCapacity:
    """The most that one replica does with requests like the present ones."""

    sequences: float
    first_full: Resource
    output_tokens: Estimate
    """Per second."""
    token_time: float
    """Seconds per output token of a sequence when the replica is full."""
    source: Source
    """measured: it was full; fitted: from minutes at different loads; extrapolated: they do not show how a fuller batch
    slows down, so that the upper end assumes that it does not, and the lower end may be just what was seen."""


@dataclass(frozen=True, slots=True)
class RequestMix:
    """What requests are like: tokens per admitted request."""

    prompt_tokens: float
    output_tokens: float


@dataclass(frozen=True, slots=True)
class Headroom:
    """The present load, and how much more of the same fits."""

    utilisation: float
    """Demand over capacity; above 1 when requests are refused."""
    output_tokens: float
    """Load now, per second."""
    requests: float
    capacity_output_tokens: Estimate
    capacity_requests: Estimate | None
    free_output_tokens: Estimate
    """What still fits, per second."""
    free_requests: Estimate | None
    first_full: Resource
    token_time: float | None
    """Seconds that a sequence takes per output token, prefill included: now, and when everything is full."""
    token_time_full: float
    source: Source


@dataclass(frozen=True, slots=True)
class FullDate:
    """When the load reaches the capacity."""

    outlook: Outlook
    growth_per_hour: Estimate | None = None
    """Requests per second that each hour adds."""
    seasonal: bool = False
    """Whether the shape of a day is known."""
    observed_s: float = 0.0
    horizon_s: float = 0.0
    """How far the trend is trusted."""
    in_s: float | None = None
    earliest_s: float | None = None
    latest_s: float | None = None
    """With the intervals of growth and capacity. None: not within the horizon."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Dollars; None where no price is known or nothing was generated."""

    per_hour: float | None
    per_million_tokens: float | None
    """Per million tokens, prompt and output together, at the present load."""
    per_million_output_tokens: float | None
    per_million_tokens_full: float | None
    """The same at full load."""


@dataclass(frozen=True, slots=True)
class NextReplica:
    """What one replica more would add, and what one fewer would save."""

    adds_output_tokens: Estimate | None
    adds_requests: Estimate | None
    per_hour: float | None
    per_month: float | None
    utilisation: float | None
    """Of all replicas, with it."""
    full: FullDate
    """When the load would reach the capacity then."""
    spare_replicas: int
    """Replicas that could be given up with the rest at most 70% full."""
    shares_machine: bool


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The answer for one model."""

    replicas: int
    headroom: Headroom | None
    """None: nothing was generated yet, or no replica is up."""
    mix: RequestMix | None
    full: FullDate
    cost: Cost
    next_replica: NextReplica


def plan_server(minutes: Sequence[LoadPoint], hours: Sequence[LoadPoint], size: FleetSize, now: float) -> ServerPlan:
    """The plan from the history in order of time; `hours` are the older and coarser part of the same history."""
    recent = [point for point in minutes if point.at + point.seconds > now - NOW_S]
    lately = [point for point in minutes if point.at + point.seconds > now - MIX_S]
    load, mix = mean(recent), request_mix(lately) or request_mix(hours)
    capacity = replica_capacity(minutes, size) or replica_capacity(hours, size)
    headroom = None
    if capacity is not None and size.replicas > 0:
        headroom = _headroom(load, mix, capacity, size.replicas)
    trend = arrivals_trend(minutes, hours)
    full = full_date(trend, headroom)
    return ServerPlan(
        size.replicas, headroom, mix, full, _cost(load, headroom, size), _next(size, capacity, headroom, mix, trend)
    )


def mean(points: Sequence[LoadPoint]) -> LoadPoint:
    """The mean of intervals, weighted by their length; zero for none."""
    seconds = sum(point.seconds for point in points)
    if not seconds:
        return LoadPoint(0.0, 0.0)

    def weighted(value: Callable[[LoadPoint], float]) -> float:
        return sum(value(point) * point.seconds for point in points) / seconds

    tokens = sum(point.output_tokens * point.seconds for point in points if point.token_time)
    token_time = sum(point.token_time * point.output_tokens * point.seconds for point in points)
    return LoadPoint(
        points[0].at,
        seconds,
        requests=weighted(lambda point: point.requests),
        refused=weighted(lambda point: point.refused),
        prompt_tokens=weighted(lambda point: point.prompt_tokens),
        output_tokens=weighted(lambda point: point.output_tokens),
        token_time=token_time / tokens if tokens else 0.0,
        running=weighted(lambda point: point.running),
        waiting=weighted(lambda point: point.waiting),
        kv_use=weighted(lambda point: point.kv_use),
        replicas=weighted(lambda point: point.replicas),
    )


def request_mix(points: Sequence[LoadPoint]) -> RequestMix | None:
    """Tokens per request; None when no request was admitted."""
    all_of = mean(points)
    admitted = all_of.requests - all_of.refused
    if admitted <= 0 or all_of.output_tokens <= 0:
        return None
    return RequestMix(all_of.prompt_tokens / admitted, all_of.output_tokens / admitted)


def replica_capacity(points: Sequence[LoadPoint], size: FleetSize) -> ReplicaCapacity | None:
    """The capacity of one replica; None when nothing was generated or its size is not known."""
    busy = [point for point in points if point.token_time > 0 and point.output_tokens > 0 and point.replicas > 0]
    if not busy:
        return None
    sequences, first_full = _most_sequences(busy, size)
    if sequences is None:
        return None
    rates = [point.output_tokens / point.replicas for point in busy]
    speed = _fit_speed(rates, [1 / point.token_time for point in busy], [point.seconds for point in busy])
    if speed.slowing >= speed.error and speed.slowing * sequences > COMPUTE_SHARE / (1 - COMPUTE_SHARE):
        first_full = "compute"
    full = [
        rate
        for rate, point in zip(rates, busy, strict=True)
        if point.running >= FULL_SHARE * sequences * point.replicas
    ]
    seen = max(rates)
    source: Source = "fitted"
    if full:
        estimate, source = _spread(full), "measured"
    else:
        # The best minute was reached, but perhaps by luck: it bounds what is likely, and the low end only for lack of
        # a better one.
        low = seen if math.isinf(speed.error) else speed.rate(sequences, speed.slowing + speed.error)
        high = max(speed.rate(sequences, max(speed.slowing - speed.error, 0.0)), seen)
        likely = speed.rate(sequences, speed.slowing)
        if speed.slowing < speed.error:
            # Half-way between the ends, on a scale of ratios.
            likely, source = math.sqrt(low * high), "extrapolated"
        estimate = Estimate(low, max(likely, seen), high)
    return ReplicaCapacity(sequences, first_full, estimate, sequences / estimate.likely, source)


def arrivals_trend(minutes: Sequence[LoadPoint], hours: Sequence[LoadPoint]) -> Trend | None:
    """The trend of arrivals: over hours once there are enough of them, else over minutes."""
    for points in (hours, minutes):
        trend = fit_trend([Sample(point.at + point.seconds / 2, point.requests) for point in points])
        if trend is not None:
            return trend
    return None


def full_date(trend: Trend | None, headroom: Headroom | None) -> FullDate:
    """When arrivals that follow `trend` reach the capacity."""
    if headroom is not None and headroom.utilisation >= 1:
        return FullDate("full", in_s=0.0, earliest_s=0.0, latest_s=0.0)
    if trend is None:
        return FullDate("unknown")
    growth = Estimate(trend.slope_low, trend.slope, trend.slope_high).times(HOUR)
    found = Crossing(None, None, None)
    if headroom is not None and (most := headroom.capacity_requests) is not None:
        # Both the growth and the capacity may be other than likely.
        found = Crossing(
            crossing(trend, most.likely).likely_s,
            crossing(trend, most.low).earliest_s,
            crossing(trend, most.high).latest_s,
        )
    outlook: Outlook = "not_within_horizon" if trend.growing else "not_growing"
    if found.likely_s is not None and (trend.growing or trend.season):
        outlook = "filling"
    if headroom is None:
        outlook = "unknown" if trend.growing else outlook
    dates = found if outlook in ("filling", "not_within_horizon") else Crossing(None, None, None)
    return FullDate(
        outlook,
        growth,
        bool(trend.season),
        trend.span_s,
        trend.horizon_s,
        dates.likely_s,
        dates.earliest_s,
        dates.latest_s,
    )


def _headroom(load: LoadPoint, mix: RequestMix | None, capacity: ReplicaCapacity, replicas: int) -> Headroom:
    most = capacity.output_tokens.times(replicas)
    admitted = load.requests - load.refused
    # What was refused would have needed as much as what was admitted.
    demand = load.output_tokens * (load.requests / admitted if admitted > 0 else 1.0)
    free = Estimate(*(max(value - demand, 0.0) for value in (most.low, most.likely, most.high)))
    per_request = mix.output_tokens if mix is not None else 0.0
    return Headroom(
        utilisation=demand / most.likely if most.likely else 0.0,
        output_tokens=load.output_tokens,
        requests=load.requests,
        capacity_output_tokens=most,
        capacity_requests=most.times(1 / per_request) if per_request else None,
        free_output_tokens=free,
        free_requests=free.times(1 / per_request) if per_request else None,
        first_full=capacity.first_full,
        token_time=load.token_time or None,
        token_time_full=capacity.token_time,
        source=capacity.source,
    )


def _cost(load: LoadPoint, headroom: Headroom | None, size: FleetSize) -> Cost:
    if size.price_per_hour is None:
        return Cost(None, None, None, None)
    per_hour = size.price_per_hour * size.replicas

    def per_million(tokens_per_s: float) -> float | None:
        return per_hour / (tokens_per_s * HOUR) * MILLION if tokens_per_s > 0 else None

    tokens, full = load.prompt_tokens + load.output_tokens, None
    if headroom is not None and load.output_tokens > 0:
        full = per_million(headroom.capacity_output_tokens.likely * tokens / load.output_tokens)
    return Cost(per_hour, per_million(tokens), per_million(load.output_tokens), full)


def _next(
    size: FleetSize,
    capacity: ReplicaCapacity | None,
    headroom: Headroom | None,
    mix: RequestMix | None,
    trend: Trend | None,
) -> NextReplica:
    adds = capacity.output_tokens if capacity is not None else None
    utilisation, spare, full = None, 0, full_date(trend, None)
    if adds is not None and size.shares_machine:
        # The cores are the same: what it adds is what the others leave idle, and that may be nothing.
        adds = Estimate(0.0, 0.0, adds.high)
    if headroom is not None and adds is not None:
        grown = (headroom.capacity_output_tokens.likely + adds.likely) / headroom.capacity_output_tokens.likely
        utilisation = headroom.utilisation / grown
        demand = headroom.utilisation * size.replicas
        spare = max(size.replicas - max(math.ceil(demand / SPARE_SHARE - 1e-9), 1), 0)
        most = headroom.capacity_requests
        full = full_date(
            trend,
            replace(
                headroom, utilisation=utilisation, capacity_requests=most.times(grown) if most is not None else None
            ),
        )
    price = size.price_per_hour
    return NextReplica(
        adds_output_tokens=adds,
        adds_requests=adds.times(1 / mix.output_tokens) if adds is not None and mix is not None else None,
        per_hour=price,
        per_month=price * MONTH_H if price is not None else None,
        utilisation=utilisation,
        full=full,
        spare_replicas=spare,
        shares_machine=size.shares_machine,
    )


def _most_sequences(points: Sequence[LoadPoint], size: FleetSize) -> tuple[float | None, Resource]:
    """Sequences that one replica can run together, and what limits them."""
    load = mean(points)
    held = load.kv_use * size.kv_tokens * load.replicas / load.running if load.running > 0 else 0.0
    by_memory = size.kv_tokens / held if held > 0 else None
    if by_memory is not None and (not size.slots or by_memory < size.slots):
        return by_memory, "kv_cache"
    return (float(size.slots), "slots") if size.slots else (None, "slots")


@dataclass(frozen=True, slots=True)
class _Speed:
    """The tokens per second of one sequence: `speed` while the replica makes `rate_seen`, and `slowing` less for each
    token per second that it makes in all."""

    rate_seen: float
    speed: float
    slowing: float
    error: float
    """Half the 90% interval of `slowing`; infinite when the load hardly varied."""

    def rate(self, sequences: float, slowing: float) -> float:
        """What the replica makes with so many sequences, on the line with this slope through what was seen."""
        return sequences * (self.speed + slowing * self.rate_seen) / (1 + sequences * slowing)


def _fit_speed(rates: Sequence[float], speeds: Sequence[float], weights: Sequence[float]) -> _Speed:
    """Weighted least squares of `speeds` over `rates`. From `n / (a + b n)` follows that the speed of a sequence falls
    linearly with the rate of the replica, and rates are measured exactly, whatever disturbs the speed of a minute."""
    total = sum(weights)
    rows = list(zip(rates, speeds, weights, strict=True))
    rate = sum(x * weight for x, _, weight in rows) / total
    speed = sum(y * weight for _, y, weight in rows) / total
    across = sum(weight * (x - rate) ** 2 for x, _, weight in rows)
    if len(rows) < LEAST_MINUTES or math.sqrt(across / total) < LEAST_SPREAD * rate:
        return _Speed(rate, speed, 0.0, math.inf)
    slope = sum(weight * (x - rate) * (y - speed) for x, y, weight in rows) / across
    rest = sum(weight * (y - speed - slope * (x - rate)) ** 2 for x, y, weight in rows)
    freedom = len(rows) - 2
    return _Speed(rate, speed, max(-slope, 0.0), t_quantile(freedom) * math.sqrt(rest / freedom / across))


def _spread(rates: Sequence[float]) -> Estimate:
    """The mean of measured rates and the range of nine tenths of them; a few alone could be lucky."""
    ordered = sorted(rates)
    cut = int(len(ordered) * 0.05)
    margin = FEW_MARGIN if len(ordered) < LEAST_MINUTES else 0.0
    return Estimate(ordered[cut] * (1 - margin), sum(ordered) / len(ordered), ordered[-1 - cut] * (1 + margin))
