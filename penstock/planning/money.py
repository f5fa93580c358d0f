"""What a fleet and an API cost: the month's bill, dollars per million tokens, and where the two cost the same.

Money is dollars as floats: the prices behind it are known to two or three digits, and nothing here is ever charged to
anybody (the ledger in `metering/` counts that). Nothing is rounded before it is shown. A month has 730 hours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.planning.catalogue import PRICE_KINDS, ApiPrice, Prices
from penstock.planning.workload import HOURS, Workload

HOURS_PER_MONTH = 730.0
DAYS_PER_MONTH = HOURS_PER_MONTH / HOURS
MILLION = 1e6
_MOST_REQUESTS = 1e10
_STEPS_PER_DECADE = 40


@dataclass(frozen=True, slots=True)
class PriceMix:
    """How the GPUs of the peak are bought, as shares. Reserved ones are paid day and night, others while they run."""

    on_demand: float = 1.0
    reserved: float = 0.0
    spot: float = 0.0

    def __post_init__(self) -> None:
        shares = (self.on_demand, self.reserved, self.spot)
        if not all(0 <= share <= 1 for share in shares) or abs(sum(shares) - 1) > 1e-6:
            given = ", ".join(f"{share:g}" for share in shares)
            raise ConfigError(f"shares of on-demand, reserved and spot GPUs must add up to 1: {given} do not")


@dataclass(frozen=True, slots=True)
class Overheads:
    """What is paid besides GPUs."""

    operations_hours: float = 40.0
    """Work of people on it, hours a month."""
    hourly_wage: float = 100.0
    egress_per_gb: float = 0.09
    """Dollars per 10**9 bytes sent to clients."""
    bytes_per_output_token: float = 250.0
    """A token streamed to a client: one server-sent event with its JSON."""
    storage_per_gb: float = 0.08
    """Dollars per 10**9 bytes and month."""
    log_bytes_per_token: float = 4.0
    """A token of the prompt or the answer in the request log."""
    log_days: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name.replace('_', ' ')} must be 0 or more, not {value:g}")


@dataclass(frozen=True, slots=True)
class GpuBill:
    """GPU hours of a month, by how they are bought, and their price together."""

    on_demand_hours: float
    reserved_hours: float
    spot_hours: float
    dollars: float

    @property
    def hours(self) -> float:
        return self.on_demand_hours + self.reserved_hours + self.spot_hours


@dataclass(frozen=True, slots=True)
class Bill:
    """A month."""

    gpus: GpuBill
    operations: float
    egress: float
    storage: float

    @property
    def total(self) -> float:
        return self.gpus.dollars + self.operations + self.egress + self.storage


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """Dollars per million tokens. Input counts all prompt tokens, cached ones too, as an API's invoice does."""

    input: float
    output: float
    all: float


def gpu_bill(prices: Prices, mix: PriceMix, gpus: Sequence[int]) -> GpuBill:
    """The month's GPUs when `gpus[h]` of them run in hour h of every day.

    Reserved ones are a share of the busiest hour, rounded down, and paid for all hours; what runs beyond them is on
    demand or spot, in the proportion of their shares. A device without any price is one's own, and free.
    """
    reserved = int(mix.reserved * max(gpus) + 1e-9)
    beyond = sum(max(0, count - reserved) for count in gpus) * DAYS_PER_MONTH
    flexible = mix.on_demand + mix.spot
    spot = beyond * mix.spot / flexible if flexible else 0.0
    on_demand = beyond - spot
    hours = (on_demand, reserved * HOURS_PER_MONTH, spot)
    if prices.on_demand is prices.reserved is prices.spot is None:
        return GpuBill(*hours, 0.0)
    dollars = 0.0
    for kind, bought in zip(PRICE_KINDS, hours, strict=True):
        price = prices.of(kind)
        if bought and price is None:
            raise ConfigError(f"the catalogue has no {kind.replace('_', '-')} price for it")
        dollars += bought * (price or 0.0)
    return GpuBill(*hours, dollars)


def monthly_bill(gpus: GpuBill, workload: Workload, overheads: Overheads, weight_bytes: float) -> Bill:
    """GPUs, people, bytes sent to clients, and bytes kept: the weights once, and the request log."""
    monthly = workload.requests_per_day * DAYS_PER_MONTH
    sent = monthly * workload.output_tokens * overheads.bytes_per_output_token
    logged = (
        workload.requests_per_day
        * (workload.prompt_tokens + workload.output_tokens)
        * overheads.log_bytes_per_token
        * overheads.log_days
    )
    return Bill(
        gpus,
        operations=overheads.operations_hours * overheads.hourly_wage,
        egress=sent / 1e9 * overheads.egress_per_gb,
        storage=(weight_bytes + logged) / 1e9 * overheads.storage_per_gb,
    )


def token_prices(total: float, workload: Workload, prefill_share: float) -> TokenPrices:
    """The whole bill spread over the month's tokens: `prefill_share` of it over the input, the rest over the output.

    The share is that of the engine's time spent on prompts, so an input token costs what it occupies.
    """
    monthly = workload.requests_per_day * DAYS_PER_MONTH / MILLION
    entered, left = monthly * workload.prompt_tokens, monthly * workload.output_tokens
    return TokenPrices(
        input=total * prefill_share / entered,
        output=total * (1 - prefill_share) / left,
        all=total / (entered + left),
    )


def api_request(price: ApiPrice, workload: Workload) -> float:
    """What an API charges for one average request; without a price for cached input, it is charged in full."""
    cached = workload.cached_tokens
    computed = workload.prompt_tokens - cached
    return (computed * price.input + cached * price.cached + workload.output_tokens * price.output) / MILLION


def api_bill(price: ApiPrice, workload: Workload) -> float:
    """What an API charges for the month."""
    return api_request(price, workload) * workload.requests_per_day * DAYS_PER_MONTH


def break_even(own: Callable[[float], float], api_per_request: float) -> float | None:
    """Requests per day from which `own(requests per day)`, a month's bill, stays below the API's for the same.

    None when it never does. A fleet's bill rises in steps, so the two may cross several times; the last one counts.
    """

    def dearer(requests: float) -> bool:
        return own(requests) > api_per_request * requests * DAYS_PER_MONTH

    decades = round(math.log10(_MOST_REQUESTS))
    grid = [10 ** (step / _STEPS_PER_DECADE) for step in range(decades * _STEPS_PER_DECADE + 1)]
    above = [index for index, requests in enumerate(grid) if dearer(requests)]
    if not above:
        return grid[0]
    if above[-1] == len(grid) - 1:
        return None
    low, high = grid[above[-1]], grid[above[-1] + 1]
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if dearer(middle) else (low, middle)
    return high
