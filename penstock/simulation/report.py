"""The figures of a simulation: what users saw, what the fleet did, what it cost; as a table and as plain data.

Latencies of a request that was sent again count from its first attempt. A request that was refused for good, lost or
not finished counts against goodput, and is in no percentile.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from penstock.bench import report
from penstock.bench.goodput import Objectives
from penstock.simulation.gaps import GapCounts
from penstock.simulation.record import STATUSES, Record, Requests
from penstock.simulation.setup import Setup

FRACTIONS = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
POINTS = 120
"""Of a plot over time."""
MAX_LINES = 6
"""Tenants that have a line of their own in a plot."""
MAX_TENANTS = 16
"""In the table of a terminal."""
Floats = NDArray[np.float64]

Series = dict[str, dict[str, list[tuple[float, float]]]]
"""By panel and by name of a line."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one tenant, or of all."""

    requests: int
    """Different ones; a request that is sent again is the same."""
    served: int
    refused: int
    """Attempts that were refused."""
    reasons: dict[str, int]
    given_up: int
    """Requests that got no answer, however often they were sent."""
    lost: int
    unfinished: int
    retries: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    resumed: int
    """Served requests that another replica continued after theirs was gone."""
    good: int
    """Requests that kept the objectives."""
    ttft_s: dict[str, float] | None
    gap_s: dict[str, float] | None
    latency_s: dict[str, float] | None

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(self.prompt_tokens, 1)

    @property
    def good_share(self) -> float:
        return self.good / max(self.requests, 1)


@dataclass(frozen=True, slots=True)
class Report:
    """One simulation."""

    title: str
    seconds: float
    """From the beginning to the last token."""
    cpu_s: float
    objectives: str
    everyone: Figures
    tenants: dict[str, Figures]
    tiers: dict[str, str]
    """Tier of each tenant."""
    gpu_hours: float
    """Of all devices, those on spot instances included."""
    spot_gpu_hours: float
    cost: float | None
    """US dollars; None: the device has no price."""
    replicas: tuple[int, float, int]
    """Fewest, mean and most that were paid for at one time."""
    starts: int
    failures: int
    interruptions: int
    series: Series
    unit: str
    """Of the time axis of `series`: s, min or h."""
    shaded: tuple[float, float] | None = None
    """The first spike, on that axis."""
    notes: list[tuple[float, str]] = field(default_factory=list)
    """What happened to the fleet, and when."""
    assumptions: dict[str, str] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        """Simulated time over the time of one core that it took."""
        return self.seconds / max(self.cpu_s, 1e-9)

    @property
    def output_tps(self) -> float:
        return self.everyone.output_tokens / self.seconds

    @property
    def good_per_s(self) -> float:
        return self.everyone.good / self.seconds

    @property
    def cost_per_million(self) -> float | None:
        """Of output tokens."""
        if self.cost is None or not self.everyone.output_tokens:
            return None
        return 1e6 * self.cost / self.everyone.output_tokens

    def as_json(self, *, series: bool = True) -> dict[str, Any]:
        document = dataclasses.asdict(self)
        if not series:
            del document["series"], document["unit"]
        derived = {
            "speed": self.speed,
            "output_tokens_per_s": self.output_tps,
            "good_requests_per_s": self.good_per_s,
            "good_share": self.everyone.good_share,
            "hit_rate": self.everyone.hit_rate,
            "cost_per_million_output_tokens": self.cost_per_million,
        }
        return document | derived


class Columns:
    """The rows of a record, or some of them, as arrays."""

    def __init__(self, requests: Requests, chosen: NDArray[np.bool_] | None = None) -> None:
        self._requests = requests
        self._chosen = chosen
        self.status = self["status"]
        self.served = self.status == STATUSES.index("served")

    def __getitem__(self, name: str) -> NDArray[Any]:
        column = self._requests.column(name)
        # A copy: the record may go on growing, which an array that shares its memory would forbid.
        every = np.array(column, dtype=np.float64 if column.typecode == "d" else np.int64)
        return every if self._chosen is None else every[self._chosen]

    def words(self, name: str) -> list[str]:
        return self._requests.words(name)

    def where(self, chosen: NDArray[np.bool_]) -> Columns:
        return Columns(self._requests, chosen)

    def count(self, status: str) -> int:
        return int(np.count_nonzero(self.status == STATUSES.index(status)))


def spread(values: Floats) -> dict[str, float] | None:
    """Percentiles; None of nothing."""
    if not len(values):
        return None
    found = np.quantile(values, list(FRACTIONS.values()))
    return {name: float(value) for name, value in zip(FRACTIONS, found, strict=True)}


def figures(rows: Columns, gaps: GapCounts, objectives: Objectives) -> Figures:
    served = rows.served
    first_at, first, end = rows["first_at"], rows["first_token"], rows["end"]
    output, attempt = rows["output_tokens"], rows["attempt"]
    ttft, latency = (first - first_at)[served], (end - first_at)[served]
    per_token = ((end - first) / np.maximum(output - 1, 1))[served]
    good = np.ones(len(ttft), dtype=bool)
    for took, limit in ((ttft, objectives.ttft), (latency, objectives.latency)):
        if limit is not None:
            good &= took <= limit
    if objectives.per_token is not None:
        good &= (per_token <= objectives.per_token) | (output[served] < 2)
    requests = int(np.count_nonzero(attempt == 0))
    refused = rows.status == STATUSES.index("refused")
    reasons, counts = np.unique(rows["reason"][refused], return_counts=True)
    words = rows.words("reason")
    known = {name: gaps.percentile(part) for name, part in FRACTIONS.items()}
    return Figures(
        requests=requests,
        served=rows.count("served"),
        refused=rows.count("refused"),
        reasons={words[reason]: int(count) for reason, count in sorted(zip(reasons, counts, strict=True), key=_most)},
        given_up=max(requests - rows.count("served") - rows.count("unfinished"), 0),
        lost=rows.count("lost"),
        unfinished=rows.count("unfinished"),
        retries=int(np.count_nonzero(attempt > 0)),
        prompt_tokens=int(rows["prompt_tokens"][served].sum()),
        cached_tokens=int(rows["cached_tokens"][served].sum()),
        output_tokens=int(output.sum()),
        preemptions=int(rows["preemptions"].sum()),
        resumed=int(np.count_nonzero(rows["moves"][served])),
        good=int(np.count_nonzero(good)),
        ttft_s=spread(ttft),
        gap_s={name: value for name, value in known.items() if value is not None} or None,
        latency_s=spread(latency),
    )


def _most(pair: tuple[Any, Any]) -> int:
    return -int(pair[1])


def make(setup: Setup, record: Record) -> Report:
    scenario, totals = setup.scenario, record.totals
    objectives = scenario.objectives.objectives
    rows = Columns(record.requests)
    tenant, names = rows["tenant"], rows.words("tenant")
    paid = [sample.ready + sample.starting + sample.draining for sample in record.samples]
    last = float(rows["end"].max()) if len(record.requests) else 0.0
    seconds = last if scenario.workload.requests is not None and last else max(last, scenario.duration_s)
    shown = min(scenario.duration_s, seconds) if scenario.workload.requests is not None else scenario.duration_s
    unit, scale = _axis(shown)
    spikes = [spike for spike in scenario.workload.spikes if spike.at_s + spike.seconds <= shown]
    return Report(
        title=scenario.title,
        seconds=seconds,
        cpu_s=totals.cpu_s,
        objectives=str(objectives),
        everyone=figures(rows, record.all_gaps(), objectives),
        tenants={
            name: figures(rows.where(tenant == index), record.gaps_of(name), objectives)
            for index, name in sorted(enumerate(names), key=lambda pair: setup.order(pair[1]))
        },
        tiers=setup.tiers,
        gpu_hours=(totals.gpu_seconds + totals.spot_gpu_seconds) / 3600,
        spot_gpu_hours=totals.spot_gpu_seconds / 3600,
        cost=totals.cost if setup.price is not None else None,
        replicas=(min(paid), sum(paid) / len(paid), max(paid)) if paid else (0, 0.0, 0),
        starts=totals.starts,
        failures=totals.failures,
        interruptions=totals.interruptions,
        series=over_time(record, rows, shown, scale, [name for name in setup.tiers if name in names]),
        unit=unit,
        shaded=next(((one.at_s / scale, (one.at_s + one.seconds) / scale) for one in spikes), None),
        notes=[(at, note) for at, note in record.notes],
        assumptions=setup.assumptions,
    )


def _axis(seconds: float) -> tuple[str, float]:
    """The unit of a time axis, and how many seconds it is."""
    if seconds <= 600:
        return "s", 1.0
    return ("min", 60.0) if seconds <= 3 * 3600 else ("h", 3600.0)


def over_time(record: Record, rows: Columns, seconds: float, scale: float, tenants: list[str]) -> Series:
    """What the plots show."""
    samples = [sample for sample in record.samples if sample.at <= seconds]
    width = seconds / min(POINTS, max(8, len(record.requests) // 8))
    bins = int(np.ceil(seconds / width))

    def points(name: str) -> list[tuple[float, float]]:
        every = max(1, len(samples) // (2 * POINTS))
        return [(sample.at / scale, float(getattr(sample, name))) for sample in samples[::every]]

    def rate(times: Floats) -> list[tuple[float, float]]:
        counts, _ = np.histogram(times, bins=bins, range=(0.0, bins * width))
        return [((index + 0.5) * width / scale, float(count) / width) for index, count in enumerate(counts)]

    at, status = rows["at"], rows.status
    refused = status == STATUSES.index("refused")
    series: Series = {
        "requests per second, by when they were sent": {
            "sent": rate(at),
            "served": rate(at[rows.served]),
            "refused": rate(at[refused]),
        },
        "time to first token in s, by when they were sent": {
            f"TTFT {name}": _binned(rows, part, width, bins, scale) for name, part in (("p50", 0.5), ("p95", 0.95))
        },
        "requests": {"running": points("running"), "waiting in engines": points("waiting"), "queued": points("queued")},
        "KV cache in use, %": {
            "all replicas": [(x, 100 * y) for x, y in points("kv_use")],
            "fullest": [(x, 100 * y) for x, y in points("kv_use_most")],
        },
        "replicas": {"ready": points("ready"), "starting": points("starting"), "desired": points("desired")},
    }
    if 1 < len(tenants) <= MAX_LINES:
        tenant, words = rows["tenant"], rows.words("tenant")
        coarse = max(8, bins // 2)
        series["time to first token of tenants, p95 in s"] = {
            name: _binned(rows.where(tenant == words.index(name)), 0.95, seconds / coarse, coarse, scale)
            for name in tenants
        }
    if any(sample.spot for sample in samples):
        series["replicas"]["spot"] = points("spot")
    lost = status == STATUSES.index("lost")
    if lost.any():
        series["requests per second, by when they were sent"]["lost"] = rate(at[lost])
    return series


def _binned(rows: Columns, part: float, width: float, bins: int, scale: float) -> list[tuple[float, float]]:
    """A percentile of the time to first token, by when requests were first sent."""
    at, ttft = rows["first_at"][rows.served], (rows["first_token"] - rows["first_at"])[rows.served]
    order = np.argsort(at, kind="stable")
    at, ttft = at[order], ttft[order]
    edges = np.searchsorted(at, np.arange(bins + 1) * width)
    held = ((index, ttft[edges[index] : edges[index + 1]]) for index in range(bins))
    return [((index + 0.5) * width / scale, float(np.quantile(some, part))) for index, some in held if len(some)]


def show(console: Console, made: Report) -> None:
    """The report as tables."""
    good = "good" if made.objectives else "answered"
    columns = ("requests", "served", "refused", "TTFT, ms", "gap, ms", "E2E, s", "cached", good)
    rows = {"all": made.everyone} | (made.tenants if len(made.tenants) > 1 else {})
    shown = [cells(made, name, one) for name, one in list(rows.items())[:MAX_TENANTS]]
    report.print_fitting(console, "", ("tenant", *columns), shown, expendable=("served", "cached", "E2E, s", "refused"))
    console.print("Latencies: p50 / p95 / p99.", style="dim")
    if len(rows) > MAX_TENANTS:
        console.print(f"{len(rows) - MAX_TENANTS} more tenants: --json or --html has them.", style="dim")
    for line in summary(made):
        console.print(line, highlight=False)


def cells(made: Report, name: str, one: Figures) -> tuple[str, ...]:
    """A row of the table of tenants."""
    tier = made.tiers.get(name) if name != "all" else None
    return (
        name if tier is None else f"{name} ({tier})",
        f"{one.requests:,}",
        f"{one.served:,}",
        f"{one.refused:,}",
        _slashed(one.ttft_s, 1e3),
        _slashed(one.gap_s, 1e3),
        _slashed(one.latency_s, 1.0),
        report.share(one.hit_rate),
        f"{one.good_share:.1%}",
    )


def _slashed(values: dict[str, float] | None, scale: float) -> str:
    if values is None:
        return "–"
    return " / ".join(f"{values[part] * scale:,.{_digits(values['p50'] * scale)}f}" for part in ("p50", "p95", "p99"))


def _digits(value: float) -> int:
    return 0 if value >= 100 else 1 if value >= 1 else 2


def duration(values: dict[str, float] | None, part: str) -> str:
    """In the unit that reads best."""
    if values is None:
        return "–"
    value = values[part]
    return f"{value * 1e3:,.1f} ms" if value < 0.1 else f"{value * 1e3:,.0f} ms" if value < 1 else f"{value:,.1f} s"


def summary(made: Report) -> list[str]:
    """The figures of the fleet, in sentences."""
    all_ = made.everyone
    lines = [f"{made.output_tps:,.0f} output tokens/s, {all_.served / made.seconds:,.2f} requests/s served"]
    if made.objectives:
        lines.append(
            f"Goodput {made.good_per_s:,.2f} requests/s: {all_.good_share:.1%} of all requests within {made.objectives}"
        )
    if all_.refused or all_.lost or all_.unfinished:
        why = ", ".join(f"{reason} {count:,}" for reason, count in all_.reasons.items())
        lines.append(
            f"{all_.refused:,} refused{f' ({why})' if why else ''}, {all_.retries:,} retries, {all_.given_up:,} "
            f"never answered, {all_.lost:,} lost, {all_.unfinished:,} not finished"
        )
    if all_.preemptions or all_.resumed:
        lines.append(f"{all_.preemptions:,} preemptions, {all_.resumed:,} streams continued on another replica")
    fewest, mean, most = made.replicas
    fleet = (
        f"{most} replica{'s' if most != 1 else ''}"
        if fewest == most
        else f"{fewest} to {most} replicas, {mean:.1f} on average"
    )
    events = [f"{made.failures} failed" if made.failures else "", f"{made.interruptions} interrupted"]
    if not made.interruptions:
        events.pop()
    happened = "".join(f", {event}" for event in events if event)
    spot = f", {_hours(made.spot_gpu_hours)} of them spot" if made.spot_gpu_hours else ""
    lines.append(f"{fleet}{happened}: {_hours(made.gpu_hours)} device hours{spot}{money(made)}")
    lines.append(
        f"{made.seconds:,.0f} s simulated in {made.cpu_s:,.1f} s of one core: "
        f"{made.speed:,.0f} times as fast as real time"
    )
    return lines


def _hours(hours: float) -> str:
    return f"{hours:,.2f}" if hours < 10 else f"{hours:,.1f}"


def money(made: Report) -> str:
    if made.cost is None:
        return "; the device has no price"
    each = "" if made.cost_per_million is None else f", ${made.cost_per_million:,.2f} per million output tokens"
    return f", ${made.cost:,.2f}{each}"
