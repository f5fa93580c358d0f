"""A plan: every deployment of a model on some hardware judged for a workload, the cheapest that keeps the objectives,
why others do not do, and what the figures rest on.

The arithmetic is in modules of its own; this one composes it. `plan_tree.as_tree` is a plan as plain values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from penstock.errors import ConfigError
from penstock.planning.assumption import assumptions
from penstock.planning.candidate import (
    Candidate,
    Options,
    Rejected,
    deployments,
    judge,
    objectives,
    window,
)
from penstock.planning.capacity import Slo
from penstock.planning.catalogue import ApiPrice, Catalogue, Device
from penstock.planning.deployment import Deployment
from penstock.planning.memory import Assumption, memory_plan
from penstock.planning.money import api_bill, api_request, break_even, gpu_bill, monthly_bill
from penstock.planning.provision import provision
from penstock.planning.remedy import remedy
from penstock.planning.sensitivity import Sensitivity, sensitivities
from penstock.planning.shape import ModelShape
from penstock.planning.workload import HOURS, Workload

_CURVE_POINTS = 120


@dataclass(frozen=True, slots=True)
class Hour:
    """An hour of the day: requests per second, and what runs."""

    hour: int
    average: float
    peak: float
    replicas: int
    devices: int
    static_devices: int


@dataclass(frozen=True, slots=True)
class CostPoint:
    """Monthly bills at a number of requests per day."""

    requests_per_day: float
    static: float
    autoscaled: float
    api: float


@dataclass(frozen=True, slots=True)
class ApiComparison:
    """The best deployment against an API."""

    price: ApiPrice
    per_request: float
    monthly: float
    break_even: float | None
    """Requests per day from which static provisioning stays cheaper; None: never."""
    autoscaled_break_even: float | None
    curve: tuple[CostPoint, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """`best` is None when no deployment does; `why_none` then says why, and what would."""

    shape: ModelShape
    workload: Workload
    slo: Slo
    options: Options
    context: int
    candidates: tuple[Candidate, ...]
    """The cheapest first."""
    rejected: tuple[Rejected, ...]
    """The nearest to what is allowed first."""
    best: Candidate | None
    why_none: str
    concurrency: tuple[tuple[int, int], ...]
    """Of one replica of the best deployment: sequences that fit at each context length."""
    day: tuple[Hour, ...]
    api: ApiComparison | None
    sensitivity: tuple[Sensitivity, ...]
    assumptions: tuple[Assumption, ...]


def make_plan(
    shape: ModelShape,
    hardware: Sequence[Device],
    workload: Workload,
    slo: Slo,
    options: Options | None = None,
    api: ApiPrice | None = None,
    catalogue: Catalogue | None = None,
) -> Plan:
    """Judges every deployment of a model on `hardware`. `catalogue`: where to look for a device that would do."""
    options = options or Options()
    context = window(shape, workload, options.context)
    candidates: list[Candidate] = []
    rejected: list[Rejected] = []
    for device in hardware:
        for made in deployments(shape, device, context, options, int(workload.shared_prefix)):
            judged = judge(made, workload, slo, options) if isinstance(made, Deployment) else made
            if isinstance(judged, Candidate):
                candidates.append(judged)
            else:
                rejected.append(judged)
    candidates.sort(key=lambda one: (one.monthly, one.fleet.devices, one.steady.ttft_s))
    rejected.sort(key=lambda one: one.ratio)
    best = candidates[0] if candidates else None
    return Plan(
        shape=shape,
        workload=workload,
        slo=slo,
        options=options,
        context=context,
        candidates=tuple(candidates),
        rejected=tuple(rejected),
        best=best,
        why_none="" if best else _why_none(shape, hardware, slo, rejected, catalogue),
        concurrency=tuple(best.memory.concurrency_table().items()) if best else (),
        day=_day(best, workload) if best else (),
        api=_against_api(best, workload, options, api) if best and api else None,
        sensitivity=sensitivities(best, workload, slo, options) if best else (),
        assumptions=assumptions(best, workload, options, api, context),
    )


def _day(best: Candidate, workload: Workload) -> tuple[Hour, ...]:
    fleet = best.fleet
    return tuple(
        Hour(
            hour=hour,
            average=workload.hour(hour).requests,
            peak=workload.hour_peak(hour).requests,
            replicas=fleet.by_hour[hour],
            devices=fleet.devices_by_hour[hour],
            static_devices=fleet.devices,
        )
        for hour in range(HOURS)
    )


def bills_at(best: Candidate, workload: Workload, options: Options, requests_per_day: float) -> tuple[float, float]:
    """The month's bill of a deployment for another number of requests of the same kind: static, and autoscaled."""
    scaled = replace(workload, users=requests_per_day / workload.requests_per_user)
    device = best.deployment.device
    fleet = provision(
        scaled, best.most.requests_per_s, options.headroom, best.deployment.devices, device.devices_per_node
    )
    static, autoscaled = (
        monthly_bill(gpu_bill(device.prices, options.mix, gpus), scaled, options.overheads, best.weight_bytes)
        for gpus in ([fleet.devices] * HOURS, fleet.devices_by_hour)
    )
    return static.total, autoscaled.total


def _against_api(best: Candidate, workload: Workload, options: Options, price: ApiPrice) -> ApiComparison:
    @cache
    def bills(requests: float) -> tuple[float, float]:
        return bills_at(best, workload, options, requests)

    each = api_request(price, workload)
    static = break_even(lambda requests: bills(requests)[0], each)
    autoscaled = break_even(lambda requests: bills(requests)[1], each)
    most = 1.25 * max(workload.requests_per_day, *(2 * level for level in (static, autoscaled) if level), 1.0)
    curve = []
    for step in range(1, _CURVE_POINTS + 1):
        requests = most * step / _CURVE_POINTS
        scaled = replace(workload, users=requests / workload.requests_per_user)
        curve.append(CostPoint(requests, *bills(requests), api_bill(price, scaled)))
    return ApiComparison(price, each, api_bill(price, workload), static, autoscaled, tuple(curve))


def _why_none(
    shape: ModelShape,
    hardware: Sequence[Device],
    slo: Slo,
    rejected: Sequence[Rejected],
    catalogue: Catalogue | None,
) -> str:
    """One sentence: what stood in the way of the nearest deployment, and what would do."""
    names = ", ".join(device.name for device in hardware) if len(hardware) <= 3 else "this hardware"
    slow = [one for one in rejected if one.kind == "objectives"]
    if slow:
        return (
            f"no deployment of {shape.name} on {names} keeps {objectives(slo)}: the nearest, {slow[0].label}, has "
            f"{slow[0].reason}; allow more, choose faster hardware, or shorten the prompts"
        )
    unpriced = [one for one in rejected if one.kind == "price"]
    if unpriced:
        return f"{unpriced[0].label}: {unpriced[0].reason}; choose other shares, or give a price in a catalogue file"
    for one in rejected:
        if one.deployment is not None:
            return f"{one.reason}; {remedy(memory_plan(one.deployment), catalogue)}"
    return rejected[0].reason if rejected else "no hardware was given: name a device of the catalogue"


def require(plan: Plan) -> Candidate:
    """The best deployment; ConfigError when there is none."""
    if plan.best is None:
        raise ConfigError(plan.why_none)
    return plan.best
