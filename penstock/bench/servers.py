"""`penstock bench servers`: the same workloads on several running servers in turn; how many times better the first is.

All servers get the same prompts in the same order. Every turn begins with another server, so that a machine that slows
down does so for all of them. With objectives, the highest rate of arrivals that keeps them is looked for on each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.bench import report, serve, stats, workloads
from penstock.bench.engine import BenchError
from penstock.bench.goodput import AtRate, Objectives, highest_rate
from penstock.bench.load import ModelThere, Tally, find_model, run_loop
from penstock.bench.wire import Target
from penstock.bench.workloads import Workload


@dataclass(frozen=True, slots=True)
class RateSearch:
    """Where the highest rate that keeps the objectives is looked for, in requests per second."""

    low: float
    high: float
    runs: int
    requests: int
    """At each rate."""
    ttft_s: float
    gap_s: float
    """For 99% of the gaps of a request."""


@dataclass(frozen=True, slots=True)
class ServersBenchSettings:
    servers: tuple[tuple[str, str], ...]
    """Names and addresses; the first is compared with the others."""
    workloads: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    """Open loops, requests per second."""
    lengths: str = "mix"
    """The workload whose lengths open loops have."""
    search: RateSearch | None = None
    repeat: int = 3
    seed: int = 0
    """Of the prompts. Servers that have answered a seed before may have its prompts cached."""
    model: str | None = None
    vocab_size: int | None = None
    """Prompt ids are below it; the smallest that a server names when not set."""


@dataclass(frozen=True, slots=True)
class Run:
    """One workload on one server. Seconds."""

    tokens_per_s: float
    ttft: stats.Percentiles
    gap: stats.Percentiles | None
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Highest:
    """The highest rate that a server kept, and how it was found."""

    rate: float
    runs: list[AtRate]


class ServersBench:
    """The runs of one call."""

    def __init__(self, settings: ServersBenchSettings, api_key: str | None, console: Console) -> None:
        self.settings = settings
        self.api_key = api_key
        self.console = console
        self._quiet = Console(stderr=True, quiet=True)
        self._warm: set[tuple[str, str]] = set()
        self.models = {name: self._model(url) for name, url in settings.servers}
        self.vocab_size = min(model.vocab_size for model in self.models.values())

    def _model(self, url: str) -> ModelThere:
        return run_loop(find_model(Target.parse(url, self.api_key), self.settings.model, self.settings.vocab_size))

    def _tally(self, name: str, url: str, workload: Workload, rate: float | None, salt: str) -> Tally:
        kind = f"{workload.name} {rate is None}"
        load, plan = serve.of_workload(workload, rate, f"{self.settings.seed} {salt}")
        load = dataclasses.replace(
            load,
            url=url,
            model=self.models[name].name,
            vocab_size=self.vocab_size,
            warm_up=0 if (name, kind) in self._warm else None,
        )
        self._warm.add((name, kind))
        with self.console.status(f"{name}: {workload.name}" + (f", {rate:.1f} requests/s" if rate else "")):
            tally = run_loop(serve.measure(load, self.api_key, self._quiet, plan))[1]
        if tally.cached_tokens:
            self.console.print(
                f"{name}, {workload.name}: {tally.cached_tokens} prompt tokens came from its prefix cache, which "
                "flatters it; take another --seed, and a server once only",
                style="yellow",
                markup=False,
            )
        return tally

    def run(self, name: str, url: str, workload: Workload, rate: float | None, turn: int) -> Run:
        tally = self._tally(name, url, workload, rate, str(turn))
        ttft = stats.percentiles(tally.ttft)
        for what, count in tally.errors.most_common(3):
            self.console.print(f"{name}, {workload.name}: {count} x {what}", style="red", markup=False)
        if ttft is None:
            raise BenchError(f"{name}: every request of workload {workload.name} failed")
        failed = sum(tally.errors.values())
        return Run(tally.output_tokens / tally.seconds, ttft, stats.percentiles(tally.gaps), failed)

    def turns(self) -> dict[str, dict[str, list[Run]]]:
        """By workload or rate, and by server."""
        settings = self.settings
        rows: dict[str, tuple[Workload, float | None]] = {
            name: (workloads.named(name), None) for name in settings.workloads
        }
        rows |= {f"{rate:g}/s": (workloads.named(settings.lengths), rate) for rate in settings.rates}
        found: dict[str, dict[str, list[Run]]] = {row: {name: [] for name, _ in settings.servers} for row in rows}
        for turn in range(settings.repeat):
            first = turn % len(settings.servers)
            order = settings.servers[first:] + settings.servers[:first]
            for row, (workload, rate) in rows.items():
                for name, url in order:
                    found[row][name].append(self.run(name, url, workload, rate, turn))
        return found

    def highest(self, search: RateSearch) -> dict[str, Highest]:
        workload = dataclasses.replace(workloads.named(self.settings.lengths), requests=search.requests)
        objectives = Objectives(ttft=search.ttft_s, gap=search.gap_s)

        def at_rate(name: str, url: str, rate: float) -> AtRate:
            tally = self._tally(name, url, workload, rate, "search")
            ttft, gap = stats.percentiles(tally.ttft), stats.percentiles(tally.gaps)
            if ttft is None or gap is None:
                raise BenchError(f"{name}: every request failed at {rate:.1f}/s: {next(iter(tally.errors), '')}")
            kept = objectives.met(tally.served) / search.requests
            self.console.print(f"{name}: {rate:.1f} requests/s, {report.share(kept)} kept", style="dim")
            return AtRate(rate, kept, ttft, gap, tally.output_tokens / tally.seconds)

        found = {}
        for name, url in self.settings.servers:
            rate, runs = highest_rate(
                lambda rate, name=name, url=url: at_rate(name, url, rate),  # type: ignore[misc]
                search.low, search.high, search.runs,
            )  # fmt: skip
            found[name] = Highest(rate, runs)
        return found


def main(settings: ServersBenchSettings, api_key: str | None, json_file: Path | None, console: Console) -> None:
    console.print(report.machine_line(), highlight=False)
    bench = ServersBench(settings, api_key, console)
    for name, url in settings.servers:
        model = bench.models[name]
        console.print(f"[bold]{name}[/bold]: {model.name} at {url}", highlight=False)
    turns = bench.turns()
    if turns:
        _show_turns(turns, settings, console)
    highest = None if settings.search is None else bench.highest(settings.search)
    if settings.search is not None and highest is not None:
        _show_highest(highest, settings.search, console)
    if json_file is not None:
        results: dict[str, Any] = {
            "turns": {
                row: {name: [dataclasses.asdict(run) for run in runs] for name, runs in by_server.items()}
                for row, by_server in turns.items()
            },
            "goodput": None if highest is None else {name: dataclasses.asdict(it) for name, it in highest.items()},
        }
        report.write_json(json_file, "servers", dataclasses.asdict(settings), results)


def _show_turns(turns: dict[str, dict[str, list[Run]]], settings: ServersBenchSettings, console: Console) -> None:
    first = settings.servers[0][0]
    runs = f"medians of {settings.repeat} turns" if settings.repeat > 1 else "one turn"
    table = report.table(
        f"The same prompts on each server, {runs}",
        *(
            "workload",
            "server",
            "output tok/s",
            "ratio",
            "TTFT p50 ms",
            "ratio",
            "p99 ms",
            "gap p50 ms",
            "p99 ms",
            "failed",
        ),
    )
    for row, by_server in turns.items():
        base = by_server[first]
        for name, of_it in by_server.items():
            table.add_row(
                row,
                name,
                report.number(stats.median(run.tokens_per_s for run in of_it)),
                _ratio([run.tokens_per_s for run in base], [run.tokens_per_s for run in of_it]),
                report.number(_ms([run.ttft.p50 for run in of_it])),
                _ratio([run.ttft.p50 for run in of_it], [run.ttft.p50 for run in base]),
                report.number(_ms([run.ttft.p99 for run in of_it])),
                report.number(_ms([run.gap.p50 for run in of_it if run.gap])),
                report.number(_ms([run.gap.p99 for run in of_it if run.gap])),
                str(sum(run.failed for run in of_it)),
            )
    console.print(table)
    console.print(
        f"Ratios: how many times better {first} is. A gap is the time between two pieces of text.", style="dim"
    )


def _show_highest(highest: dict[str, Highest], search: RateSearch, console: Console) -> None:
    rates = [found.rate for found in highest.values()]
    table = report.table("Highest rate kept", "server", "requests/s", "ratio", "kept", "TTFT p50 ms", "gap p99 ms")
    for name, found in highest.items():
        best = next((run for run in found.runs if run.rate == found.rate), found.runs[0])
        table.add_row(
            name,
            f"{found.rate:.1f}" if found.rate else f"below {search.low:g}",
            f"{rates[0] / found.rate:.2f}" if rates[0] and found.rate else "–",
            report.share(best.kept),
            report.number(1e3 * best.ttft.p50),
            report.number(1e3 * best.gap.p99),
        )
    console.print(table)
    console.print(
        f"Kept: the first token within {1e3 * search.ttft_s:g} ms and 99% of the gaps of a request within "
        f"{1e3 * search.gap_s:g} ms, for 95% of {search.requests} requests at random times.",
        style="dim",
    )


def _ms(seconds: Sequence[float]) -> float | None:
    found = stats.median(seconds)
    return None if found is None else 1e3 * found


def _ratio(above: Sequence[float], below: Sequence[float]) -> str:
    over, under = stats.median(above), stats.median(below)
    return f"{over / under:.2f}" if over and under else "–"
