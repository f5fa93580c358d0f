"""The report of drills as one HTML page: throughput with the fault marked, and what was found. Nothing is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from penstock.bench import charts
from penstock.bench.page import document, table
from penstock.bench.report import machine_line

if TYPE_CHECKING:
    from penstock.fleet.drills.run import Result

STYLE = """<style>
body { max-width: 1080px; } h2 { font-size: 1.1rem; margin-top: 2.5rem; } svg { display: block; max-width: 760px; }
.figures { overflow-x: auto; font-size: 13px; } .figures td { white-space: nowrap; }
.figures td, .figures th { padding: .25rem .5rem; vertical-align: bottom; }
.lost { color: #b91c1c; font-weight: 600; } .kept { color: #15803d; font-weight: 600; } ul { padding-left: 1.2rem; }
</style>"""
MAX_LINES = 50


def verdict(result: Result) -> str:
    lost = {kind: count for kind, count in result.losses.counts().items() if count}
    return ", ".join(f"{count} {kind}" for kind, count in lost.items()) or "nothing lost"


def seconds(value: float | None, otherwise: str = "–") -> str:
    return otherwise if value is None else f"{value:.1f}"


def render(results: Sequence[Result]) -> str:
    failed = [result.name for result in results if not result.passed]
    title = f"{len(results)} drill{'s' if len(results) != 1 else ''}"
    head = (
        "drill", "lost", "detected, s", "longest pause, s", "first token again, s", "full capacity, s", "streams",
        "resumed", "started over", "tokens", "charges", "exact",
    )  # fmt: skip
    said = f"something was lost in: {', '.join(failed)}" if failed else "nothing was lost"
    parts = [
        STYLE,
        f"<h1>{escape(title)}</h1>",
        f'<p class="{"lost" if failed else "kept"}">{escape(said)}</p>',
        f'<p class="dim">{escape(machine_line())}</p>',
        f'<div class="figures">{table(head, (_cells(result) for result in results))}</div>',
        '<p class="dim">Times are seconds after the fault. Detected: the first warning in a log, or the first look at '
        "a gateway that shows it. First token again: when the stream that waited longest went on. Started over: nobody "
        "knew the stream any more, because its gateway and its engine had both died. Exact: charges that equal what a "
        "client was told.</p>",
    ]
    for result in results:
        parts += _one(result)
    return document(title, parts)


def _cells(result: Result) -> tuple[str, ...]:
    return (
        result.name,
        verdict(result),
        seconds(result.detected_s),
        f"{result.pause_s:.1f}",
        seconds(result.again_s, "no pause"),
        seconds(result.full_s),
        f"{result.streams:,}",
        f"{result.resumed:,}",
        f"{result.restarted:,}",
        f"{result.tokens:,}",
        f"{result.ledger.charges:,}",
        f"{result.ledger.exact:,}",
    )


def _one(result: Result) -> list[str]:
    parts = [f"<h2>{escape(result.name)}: {escape(result.title)}</h2>"]
    if result.timeline:
        series = {"tokens per second, all clients": {"all clients": result.timeline}}
        span = (result.broken_s, result.healed_s)
        parts.append(charts.lines(f"{result.name}: broken in the shaded span", series, shaded=span))
    notes = [*result.notes, *([f"noticed by: {result.noticed}"] if result.noticed else [])]
    parts.append("<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>")
    lost = result.losses.lines()
    if lost:
        parts.append('<ul class="lost">' + "".join(f"<li>{escape(line)}</li>" for line in lost[:MAX_LINES]) + "</ul>")
        if len(lost) > MAX_LINES:
            parts.append(f"<p>and {len(lost) - MAX_LINES} more</p>")
    return parts
