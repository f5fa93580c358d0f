"""The same traffic on several fleets: replica policies, and ways to choose the number of replicas.

A comparison is fair because the requests are drawn from the scenario's seed alone; only in a conversation does the time
of an answer decide when the next question comes, as it would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from rich.console import Console

from penstock.bench import report as bench_report
from penstock.bench.charts import bars
from penstock.errors import ConfigError
from penstock.planning.autoscaling import Autoscaler
from penstock.planning.capacity import RequestShape, Slo, most_load
from penstock.routing.policies import POLICIES
from penstock.simulation import report
from penstock.simulation.queue_hpa import QueueHPA
from penstock.simulation.report import Report, duration
from penstock.simulation.scenario import MAX_REPLICAS, SpotConfig
from penstock.simulation.setup import Setup, run, with_policy, without_pools
from penstock.simulation.workload import rates

OURS = "predicted"
SIMPLE = ("round_robin", "random")
Progress = Callable[[str], Callable[[float], None]]
"""Makes a hook for the simulated time from the name of a run."""


def policies(setup: Setup, progress: Progress) -> dict[str, Report]:
    """Every replica policy on the scenario's traffic."""
    made = {}
    for name in POLICIES:
        chosen = with_policy(setup, name)
        made[name] = report.make(chosen, run(chosen, progress=progress(name)))
    return made


def show_policies(console: Console, reports: Mapping[str, Report]) -> None:
    columns = (
        "policy", "prefix hits", "TTFT p50", "TTFT p95", "TTFT p99", "output tokens/s", "served", "refused",
        "p99 x ours", "tokens / ours",
    )  # fmt: skip
    rows = []
    ours = reports[OURS]
    for name, made in reports.items():
        ratio = _ratio(_ttft(made, "p99"), _ttft(ours, "p99"))
        row = (
            name,
            bench_report.share(made.everyone.hit_rate),
            *(duration(made.everyone.ttft_s, part) for part in ("p50", "p95", "p99")),
            bench_report.number(made.output_tps, 0),
            f"{made.everyone.served:,}",
            f"{made.everyone.refused:,}",
            "–" if ratio is None else f"{ratio:.2f}",
            f"{made.output_tps / max(ours.output_tps, 1e-9):.2f}",
        )
        rows.append(row)
    expendable = ("served", "TTFT p95", "tokens / ours", "refused")
    bench_report.print_fitting(console, _title(reports), columns, rows, expendable=expendable)


def policies_chart(reports: Mapping[str, Report]) -> str:
    panels = {
        "prefix hits, %": {name: 100 * made.everyone.hit_rate for name, made in reports.items()},
        "TTFT p50, ms": {name: 1e3 * _ttft(made, "p50") for name, made in reports.items()},
        "TTFT p99, ms": {name: 1e3 * _ttft(made, "p99") for name, made in reports.items()},
        "output tokens/s, thousands": {name: made.output_tps / 1e3 for name, made in reports.items()},
    }
    return bars(f"Replica policies: {next(iter(reports.values())).title}", panels, digits=1)


def worse_policies(setup: Setup, reports: Mapping[str, Report]) -> list[str]:
    """The simple policies that ours does not beat in every respect, where prompts repeat."""
    work = setup.scenario.workload
    if work.turns == 1 and not work.system_tokens:
        return []
    ours = reports[OURS]
    return [name for name in SIMPLE if name in reports and not _better(ours, reports[name])]


def _better(ours: Report, theirs: Report) -> bool:
    return (
        ours.everyone.hit_rate > theirs.everyone.hit_rate
        and ours.output_tps > theirs.output_tps
        and all(_ttft(ours, part) < _ttft(theirs, part) for part in ("p50", "p99"))
    )


def pools(setup: Setup, progress: Progress) -> dict[str, Report]:
    """The scenario's pools beside the same replicas without pools."""
    if not setup.scenario.pools:
        raise ConfigError("--compare pools needs a scenario with `pools:`, such as long-prompts.yaml")
    shared = without_pools(setup)
    return {
        "without pools": report.make(shared, run(shared, progress=progress("without pools"))),
        "with pools": report.make(setup, run(setup, progress=progress("with pools"))),
    }


POOL_COLUMNS = ("tenant", "fleet", "served", "refused", "TTFT p50", "TTFT p99", "gap p50", "gap p99")


def pool_cells(reports: Mapping[str, Report]) -> list[tuple[str, ...]]:
    return [
        (
            tenant,
            name,
            f"{found.served:,}",
            f"{found.refused:,}",
            *(duration(found.ttft_s, part) for part in ("p50", "p99")),
            *(duration(found.gap_s, part) for part in ("p50", "p99")),
        )
        for tenant in next(iter(reports.values())).tenants
        for name, made in reports.items()
        for found in (made.tenants[tenant],)
    ]


def show_pools(console: Console, reports: Mapping[str, Report]) -> None:
    bench_report.print_fitting(
        console, _title(reports), POOL_COLUMNS, pool_cells(reports), expendable=("refused", "served")
    )


def autoscale(setup: Setup, progress: Progress) -> dict[str, Report]:
    """Our autoscaler beside fixed fleets for the peak and for the mean, and a plain HPA."""
    config = setup.scenario.autoscale
    if config is None:
        raise ConfigError("--compare autoscale needs a scenario with `autoscale:`, such as day-with-launch.yaml")
    if setup.scenario.workload.arrivals in ("closed", "trace"):
        raise ConfigError("--compare autoscale needs arrivals at a rate, from which the fixed fleets are sized")
    capacity = replica_rate(setup) * config.target_utilisation
    load = rates(setup.scenario)
    at_peak = _fleet_for(load.peak, capacity, config.max)
    at_mean = _fleet_for(load.total / setup.scenario.duration_s, capacity, config.max)
    fixed = replace(setup, scenario=replace(setup.scenario, spot=SpotConfig()))
    return {
        f"fixed for the peak ({at_peak})": _fixed(fixed, at_peak, progress("static at peak")),
        f"fixed for the mean ({at_mean})": _fixed(fixed, at_mean, progress("static at mean")),
        "HPA on queue depth": report.make(
            fixed, run(fixed, scaler=QueueHPA(config.min, config.max), progress=progress("HPA"))
        ),
        "Penstock's autoscaler": report.make(
            setup, run(setup, scaler=Autoscaler(config), progress=progress("autoscaler"))
        ),
    }


def _fixed(setup: Setup, replicas: int, progress: Callable[[float], None]) -> Report:
    return report.make(setup, run(setup, replicas=replicas, progress=progress))


def _fleet_for(rate: float, per_replica: float, most: int) -> int:
    return min(max(math.ceil(rate / per_replica), 1), most, MAX_REPLICAS)


def replica_rate(setup: Setup) -> float:
    """Requests per second of one replica within the objectives, by the planner."""
    work, objectives = setup.scenario.workload, setup.scenario.objectives
    request = RequestShape(prompt=work.system_tokens + work.input_tokens, cached=0, output=work.output_tokens)
    found = most_load(setup.deployment, setup.calibration, request, Slo(objectives.ttft_s, objectives.per_token_s))
    if found.requests_per_s <= 0:
        raise ConfigError(f"a replica cannot keep the objectives for even one request: {found.limited_by}")
    return found.requests_per_s


AUTOSCALE_COLUMNS = (
    "fleet", "replicas", "SLO misses", "refused", "TTFT p50", "TTFT p95", "TTFT p99", "device hours", "cost", "starts",
)  # fmt: skip


def show_autoscale(console: Console, reports: Mapping[str, Report]) -> None:
    rows = [(name, *autoscale_cells(made)) for name, made in reports.items()]
    expendable = ("starts", "TTFT p50", "TTFT p99", "cost", "refused")
    bench_report.print_fitting(console, _title(reports), AUTOSCALE_COLUMNS, rows, expendable=expendable)


def autoscale_cells(made: Report) -> tuple[str, ...]:
    fewest, mean, most = made.replicas
    everyone = made.everyone
    return (
        f"{most}" if fewest == most else f"{fewest}–{most}, mean {mean:.1f}",
        f"{everyone.requests - everyone.good:,} ({1 - everyone.good_share:.2%})",
        f"{everyone.refused:,}",
        *(duration(everyone.ttft_s, part) for part in ("p50", "p95", "p99")),
        f"{made.gpu_hours:,.1f}",
        "–" if made.cost is None else f"${made.cost:,.0f}",
        f"{made.starts}",
    )


def _title(reports: Mapping[str, Report]) -> str:
    return next(iter(reports.values())).title


def _ttft(made: Report, part: str) -> float:
    return made.everyone.ttft_s[part] if made.everyone.ttft_s is not None else math.inf


def _ratio(one: float, other: float) -> float | None:
    return None if not math.isfinite(one) or not math.isfinite(other) or other == 0 else one / other
