"""What `penstock simulate` does with a scenario: run it once, compare, or set it beside a real engine; then report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from penstock.bench import report as bench_report
from penstock.bench.page import table
from penstock.errors import ConfigError
from penstock.simulation import compare, page, report
from penstock.simulation.report import Report
from penstock.simulation.scenario import Scenario
from penstock.simulation.setup import Setup, prepare
from penstock.simulation.setup import run as run_setup


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files to write beside what is printed."""

    json: Path | None = None
    html: Path | None = None
    chart: Path | None = None


def run(scenario: Scenario, comparison: str | None, outputs: Outputs, console: Console) -> bool:
    """Simulates, prints and writes; says whether a comparison came out as it should."""
    setup = prepare(scenario)
    for what, value in setup.assumptions.items():
        console.print(f"{what}: {value}", style="dim", highlight=False, markup=False)
    if comparison == "policies":
        return _policies(setup, outputs, console)
    if comparison == "pools":
        return _pools(setup, outputs, console)
    if comparison == "autoscale":
        return _autoscale(setup, outputs, console)
    with _bar(console, scenario.duration_s) as hook:
        record = run_setup(setup, progress=hook(scenario.title))
    made = report.make(setup, record)
    console.print(made.title, style="bold", highlight=False, markup=False)
    report.show(console, made)
    _write(outputs, scenario, made.as_json(), page.render(made), page.over_time(made), console)
    return True


def _policies(setup: Setup, outputs: Outputs, console: Console) -> bool:
    with _bar(console, setup.scenario.duration_s) as hook:
        reports = compare.policies(setup, hook)
    compare.show_policies(console, reports)
    _speed(reports, console)
    chart = compare.policies_chart(reports)
    html = page.render_comparison(f"Replica policies: {setup.scenario.title}", reports, chart)
    _write(outputs, setup.scenario, _as_json(reports), html, chart, console)
    worse = compare.worse_policies(setup, reports)
    if worse:
        console.print(f"{compare.OURS} is not better than {' and '.join(worse)} in every respect", style="red")
    return not worse


def _pools(setup: Setup, outputs: Outputs, console: Console) -> bool:
    with _bar(console, setup.scenario.duration_s) as hook:
        reports = compare.pools(setup, hook)
    compare.show_pools(console, reports)
    _speed(reports, console)
    chart = page.overlay(
        setup.scenario.title,
        reports,
        {"time to first token, p95 in s": "time to first token in s, by when they were sent/TTFT p95"},
    )
    cells = table(compare.POOL_COLUMNS, compare.pool_cells(reports))
    html = page.render_comparison(f"Pools: {setup.scenario.title}", reports, cells + chart)
    _write(outputs, setup.scenario, _as_json(reports), html, chart, console)
    return True


def _autoscale(setup: Setup, outputs: Outputs, console: Console) -> bool:
    with _bar(console, setup.scenario.duration_s) as hook:
        reports = compare.autoscale(setup, hook)
    compare.show_autoscale(console, reports)
    _speed(reports, console)
    chart = page.overlay(
        setup.scenario.title,
        reports,
        {
            "replicas ready": "replicas/ready",
            "time to first token, p95 in s": "time to first token in s, by when they were sent/TTFT p95",
            "refused requests per second": "requests per second, by when they were sent/refused",
        },
    )
    cells = ((name, *compare.autoscale_cells(made)) for name, made in reports.items())
    html = page.render_comparison(
        f"Autoscaling: {setup.scenario.title}", reports, table(compare.AUTOSCALE_COLUMNS, cells) + chart
    )
    _write(outputs, setup.scenario, _as_json(reports), html, chart, console)
    return True


def _as_json(reports: Mapping[str, Report]) -> dict[str, Any]:
    return {name: made.as_json() for name, made in reports.items()}


def _speed(reports: Mapping[str, Report], console: Console) -> None:
    simulated, cpu = (sum(getattr(made, key) for made in reports.values()) for key in ("seconds", "cpu_s"))
    console.print(
        f"{simulated:,.0f} s simulated in {cpu:,.1f} s of one core: "
        f"{simulated / max(cpu, 1e-9):,.0f} times as fast as real time"
    )


def _write(outputs: Outputs, scenario: Scenario, figures: Any, html: str, chart: str, console: Console) -> None:
    if outputs.json is not None:
        bench_report.write_json(outputs.json, "simulate", asdict(scenario), figures)
    if outputs.html is not None:
        bench_report.write_text(outputs.html, html)
    if outputs.chart is not None:
        bench_report.write_text(outputs.chart, chart)
    for path in (outputs.json, outputs.html, outputs.chart):
        if path is not None:
            console.print(f"Written: {path}", highlight=False, markup=False)


@contextmanager
def _bar(console: Console, seconds: float) -> Iterator[Callable[[str], Callable[[float], None]]]:
    """A progress bar over the simulated time of one run after another."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:

        def begin(name: str) -> Callable[[float], None]:
            for task in bar.task_ids:
                bar.remove_task(task)
            task = bar.add_task(name, total=seconds)

            def tell(now: float) -> None:
                bar.update(task, completed=min(now, seconds))

            return tell

        yield begin


AGAINST_KEYS = {"model": "--model", "duration_s": "--duration", "seed": "--seed"}


def compare_with_engine(given: Mapping[str, str], processor_time: bool, outputs: Outputs, console: Console) -> bool:
    """A real engine on this machine and the simulation of it, on the same trace; says whether they agree."""
    from penstock.simulation import against_engine

    others = [key for key in given if key not in AGAINST_KEYS]
    if others:
        allowed = ", ".join(AGAINST_KEYS.values())
        raise ConfigError(f"--against engine makes its own trace and takes {allowed} only, not {others[0]}")
    if outputs.html is not None or outputs.chart is not None:
        raise ConfigError("--against engine prints a table and writes --json; it has no page and no chart")
    shape = against_engine.TraceShape(seconds=float(given.get("duration_s", 60)), seed=int(given.get("seed", 1)))
    made = against_engine.run(given.get("model", "smollm2-135m"), shape, processor_time, console)
    against_engine.show(console, made)
    if outputs.json is not None:
        bench_report.write_json(outputs.json, "simulate against engine", asdict(shape), made.as_json())
        console.print(f"Written: {outputs.json}", highlight=False, markup=False)
    return made.agrees
