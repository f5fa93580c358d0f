"""The report of a load as one HTML page: figures, and charts of what happened when. Nothing in it is fetched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from penstock.bench import charts, report
from penstock.bench.goodput import Served
from penstock.bench.load import Tally

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 760px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.25rem; } table { border-collapse: collapse; margin: 1rem 0; }
td, th { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #9ca3af55; }
td:first-child, th:first-child { text-align: left; } .note { color: #b45309; } .dim { color: #6b7280; }
"""
_BINS = 120


def render(title: str, results: dict[str, Any], tally: Tally, notes: Sequence[str]) -> str:
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="dim">{escape(report.machine_line())}</p>', _summary(results)]
    parts += [f'<p class="note">{escape(note)}</p>' for note in notes]
    parts.append(_latencies(results["latency_s"]))
    if tally.served:
        parts += [_over_time(tally), _cumulative(tally)]
    if tally.errors:
        parts.append(table(("errors", "count"), ((what, str(count)) for what, count in tally.errors.most_common())))
    return document(title, parts)


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page around its parts."""
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return "\n".join([head, *parts, "</html>"]) + "\n"


def _summary(results: dict[str, Any]) -> str:
    rows = [
        ("output tokens per second", report.number(results["output_tps"])),
        ("total tokens per second", report.number(results["total_tps"])),
        ("requests per second", report.number(results["requests_per_s"], 2)),
        ("succeeded", f"{results['succeeded']:,}"),
        ("failed", f"{results['failed']:,}"),
    ]
    if "goodput" in results:
        good = results["goodput"]
        within = f"requests per second within {good['objectives']}"
        rows.append((within, f"{report.number(good['requests_per_s'], 2)} ({report.share(good['share'])})"))
    return table(("", ""), rows)


def _latencies(latencies: dict[str, Any]) -> str:
    columns = ("p50", "p90", "p99", "mean", "largest")
    rows = []
    for label, values in latencies.items():
        figures = (None if values is None else values[column] * 1e3 for column in columns)
        rows.append((label, *(report.number(figure) for figure in figures)))
    return table(("ms", "p50", "p90", "p99", "mean", "max"), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are text; the first column is its rows' names."""
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def _over_time(tally: Tally) -> str:
    """Requests that came and ended, those in flight, and time to first token, bin by bin."""
    width = tally.seconds / min(_BINS, max(8, len(tally.served) // 4))
    bins = int(tally.seconds / width) + 1

    def counted(when: Callable[[Served], float]) -> list[int]:
        counts = [0] * bins
        for request in tally.served:
            counts[min(bins - 1, max(0, int(when(request) / width)))] += 1
        return counts

    came, ended = counted(lambda request: request.due), counted(lambda request: request.end)
    flying, now = [], 0
    for arrived, left in zip(came, ended, strict=True):
        now += arrived - left
        flying.append(float(now))
    firsts: dict[int, list[float]] = {}
    for request in tally.served:
        firsts.setdefault(min(bins - 1, int(request.due / width)), []).append(request.ttft)

    def points(values: Iterable[float]) -> list[tuple[float, float]]:
        return [(index * width, value) for index, value in enumerate(values)]

    slowest = [(index * width, 1e3 * max(values)) for index, values in sorted(firsts.items())]
    panels = {
        "requests per second": {
            "came": points(count / width for count in came),
            "ended": points(count / width for count in ended),
        },
        "in flight": {"in flight": points(flying)},
        "slowest time to first token, ms, by when they came": {"TTFT": slowest},
    }
    return charts.lines("Over time (requests that succeeded)", panels)


def _cumulative(tally: Tally) -> str:
    """The share of requests that took no longer than each number of milliseconds."""

    def curve(values: Iterable[float]) -> list[tuple[float, float]]:
        ordered = sorted(values)
        kept = sorted({round(index * (len(ordered) - 1) / 200) for index in range(201)})
        return [(1e3 * ordered[index], 100 * (index + 1) / len(ordered)) for index in kept]

    curves = {"TTFT": curve(tally.ttft), "E2E": curve(tally.latency)}
    return charts.lines("Share of requests within a time", {"%": curves}, unit="ms")
