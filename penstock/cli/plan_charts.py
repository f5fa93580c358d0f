"""The charts of a plan, as SVG: what is bought, what fits, the day, the API, and what the bill depends on."""

from __future__ import annotations

from penstock.bench import charts
from penstock.cli.plan_table import formats, layout, shown
from penstock.planning.plan import ApiComparison, Plan

_ROWS = 10


def draw(plan: Plan) -> dict[str, str]:
    """By name, in the order of reading; those for which there is nothing to show are left out."""
    drawn = {}
    if plan.best is not None:
        if plan.best.monthly >= 1:
            drawn["cost"] = _cost(plan)
        drawn["concurrency"] = _concurrency(plan)
        drawn["day"] = _day(plan)
    if plan.api is not None:
        drawn["break-even"] = _break_even(plan.api)
    if plan.best is not None and plan.best.monthly >= 1:
        drawn["sensitivity"] = _sensitivity(plan, plan.best.monthly)
    return drawn


def _cost(plan: Plan) -> str:
    rows = {}
    for candidate in shown(plan)[:_ROWS]:
        bill = candidate.autoscaled if plan.options.autoscaled else candidate.static
        name = f"{candidate.fleet.replicas} x {candidate.label}"
        rows[name] = {
            "GPUs": bill.gpus.dollars,
            "operations": bill.operations,
            "egress and storage": bill.egress + bill.storage,
        }
    how = "autoscaled" if plan.options.autoscaled else "static"
    return charts.stacked(f"Monthly bill by deployment, dollars, {how}", rows, marked=next(iter(rows)))


def _concurrency(plan: Plan) -> str:
    """Of the cheapest deployments."""
    lengths = [length for length, _ in plan.concurrency]
    series: dict[str, list[tuple[float, float]]] = {}
    for candidate in plan.candidates:
        name = f"{layout(candidate.deployment)}, {formats(candidate.deployment)}"
        counts = [(float(length), float(candidate.memory.concurrency(length))) for length in lengths]
        if len(series) < len(charts.COLOURS) and all(count for _, count in counts):
            series[name] = counts
    panels = {"sequences in the KV cache of one replica": series}
    return charts.lines("Concurrency by context length", panels, unit="tokens", logarithmic=True)


def _day(plan: Plan) -> str:
    """Steps: an hour is level from its beginning to its end."""

    def steps(values: list[float]) -> list[tuple[float, float]]:
        return [point for hour, value in enumerate(values) for point in ((hour, value), (hour + 1, value))]

    panels = {
        "requests per second": {
            "average of the hour": steps([hour.average for hour in plan.day]),
            "bursts": steps([hour.peak for hour in plan.day]),
        },
        "devices": {
            "static": steps([float(hour.static_devices) for hour in plan.day]),
            "autoscaled": steps([float(hour.devices) for hour in plan.day]),
        },
    }
    return charts.lines("Load and devices over the day", panels, unit="h")


def _break_even(api: ApiComparison) -> str:
    thousands = [(point, point.requests_per_day / 1e3) for point in api.curve]
    series = {
        "self-hosted, static": [(x, point.static) for point, x in thousands],
        "self-hosted, autoscaled": [(x, point.autoscaled) for point, x in thousands],
        api.price.name: [(x, point.api) for point, x in thousands],
    }
    return charts.lines("Self-hosting against an API", {"dollars a month, by requests a day": series}, unit="k")


def _sensitivity(plan: Plan, base: float) -> str:
    rows = {
        row.name: ((row.low.value, row.low.monthly), (row.high.value, row.high.monthly))
        for row in plan.sensitivity
        if row.low.monthly is not None and row.high.monthly is not None
    }
    return charts.tornado("Monthly bill, dollars, with one input lower or higher", base, rows)
