"""How the figures of conversations look: tables on the console, charts by turn on a page."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from rich.console import Console

from penstock.bench import charts, page, report, stats
from penstock.bench.agents.figures import Verdict
from penstock.bench.agents.load import Progress

_PERCENTILES = ("p50", "p90", "p99")
_TURN_COLUMNS = ("turn", "answers", "prompt tokens", "cached", *(f"TTFT {at}, ms" for at in _PERCENTILES))
_LATENCY_COLUMNS = ("ms", *_PERCENTILES, "mean", "max")


def show(results: dict[str, Any], notes: Sequence[str], console: Console, verdicts: Sequence[Verdict] = ()) -> None:
    for columns, rows in ((_TURN_COLUMNS, _turns(results)), (_LATENCY_COLUMNS, _latencies(results))):
        made = report.table("", *columns)
        for row in rows:
            made.add_row(*row)
        console.print(made)
    for line in _summary(results):
        console.print(line, highlight=False)
    for what, count in _errors(results)[:5]:
        console.print(f"{count} x {what}", style="red", markup=False)
    for note in notes:
        console.print(note, style="yellow")
    for verdict in verdicts:
        console.print(str(verdict), style="green" if verdict.met else "red", highlight=False)


def so_far(progress: Progress, planned: int) -> str:
    """One line about a run that is under way, for a log."""
    tally = progress.tally
    later = stats.percentiles(turn.ttft for turn in tally.turns if turn.turn > 0)
    first = "" if later is None else f"; TTFT p50 of later turns {1e3 * later.p50:.0f} ms"
    known = [turn for turn in tally.turns if turn.cached_tokens is not None]
    history = sum(turn.history_tokens for turn in known)
    cached = sum(turn.cached_tokens or 0 for turn in known if turn.history_tokens)
    share = f", {cached / history:.1%} of the history cached" if history else ""
    seconds = time.perf_counter() - tally.began
    return f"{progress.done:,} of {planned:,} turns after {seconds:.0f} s ({progress}){first}{share}"


def render(title: str, results: dict[str, Any], notes: Sequence[str], verdicts: Sequence[Verdict] = ()) -> str:
    """One HTML page; nothing in it is fetched."""
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="dim">{escape(report.machine_line())}</p>']
    parts += [f"<p>{escape(line)}</p>" for line in _summary(results)]
    parts += [f"<p>{escape(str(verdict))}</p>" for verdict in verdicts]
    parts += [f'<p class="note">{escape(note)}</p>' for note in notes]
    answered = [row for row in results["turns"] if row["succeeded"]]
    if answered:
        parts.append(_by_turn(answered))
    parts += [page.table(_LATENCY_COLUMNS, _latencies(results)), page.table(_TURN_COLUMNS, _turns(results))]
    if results["errors"]:
        parts.append(page.table(("errors", "count"), ((what, str(count)) for what, count in _errors(results))))
    return page.document(title, parts)


def _by_turn(rows: Sequence[dict[str, Any]]) -> str:
    def line(figure: Callable[[dict[str, Any]], float]) -> list[tuple[float, float]]:
        return [(row["turn"], figure(row)) for row in rows]

    panels = {
        "time to first token, ms": {
            at: line(lambda row, at=at: 1e3 * row["ttft_s"][at])  # type: ignore[misc]
            for at in _PERCENTILES
        },
        "prompt tokens": {"prompt tokens": line(lambda row: row["prompt_tokens"])},
    }
    if all(row["cached_share"] is not None for row in rows):
        panels["% of prompt tokens"] = {
            "from the cache": line(lambda row: 100 * row["cached_share"]),
            "read or generated in the turn before": line(lambda row: 100 * row["history_share"]),
        }
    return charts.lines("Turn by turn", panels, unit="")


def _turns(results: dict[str, Any]) -> list[list[str]]:
    return [
        [
            str(row["turn"]),
            str(row["succeeded"]),
            report.number(row["prompt_tokens"], 0),
            _percent(row["cached_share"]),
            *_milliseconds(row["ttft_s"], _PERCENTILES),
        ]
        for row in results["turns"]
    ]


def _latencies(results: dict[str, Any]) -> list[list[str]]:
    columns = (*_PERCENTILES, "mean", "largest")
    return [[label, *_milliseconds(values, columns)] for label, values in results["latency_s"].items()]


def _summary(results: dict[str, Any]) -> list[str]:
    return [
        f"From the cache: {_percent(results['cached_share'])} of all prompt tokens, "
        f"{_percent(results['cached_share_of_history'])} of those that the turn before had read or generated, "
        f"which are {_percent(results['history_share'])} of all.",
        f"{report.number(results['output_tps'])} output tok/s, {report.number(results['prompt_tps'])} prompt tok/s; "
        f"{report.number(results['in_flight'])} turns in flight on average.",
        f"{results['succeeded']} turns succeeded, {results['failed']} failed in {results['seconds']:.1f} s.",
    ]


def _errors(results: dict[str, Any]) -> list[tuple[str, int]]:
    return sorted(results["errors"].items(), key=lambda error: -error[1])


def _milliseconds(values: dict[str, float] | None, columns: Sequence[str]) -> list[str]:
    return [report.number(None if values is None else 1e3 * values[column]) for column in columns]


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
