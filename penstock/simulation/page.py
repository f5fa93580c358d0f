"""The report of a simulation, or of several on the same traffic, as one HTML page. Nothing in it is fetched."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from penstock.bench import charts
from penstock.bench.page import document, table
from penstock.bench.report import share
from penstock.simulation.report import Figures, Report, duration, money, summary

MAX_NOTES = 200
SHOWN = ("requests per second, by when they came", "time to first token in s, by when they came", "replicas")
"""Panels of a comparison."""


def render(made: Report) -> str:
    """One simulation."""
    return document(made.title, [f"<h1>{escape(made.title)}</h1>", *_body(made)])


def render_comparison(title: str, reports: Mapping[str, Report], head: str) -> str:
    """Several: what differs first (`head`), then each by itself."""
    parts = [f"<h1>{escape(title)}</h1>", head]
    for name, made in reports.items():
        parts += [f"<h2>{escape(name)}</h2>", *_body(made)]
    return document(title, parts)


def overlay(title: str, reports: Mapping[str, Report], panels: Mapping[str, str]) -> str:
    """A chart over time with one line per report; `panels` maps a panel's title to `panel/line` of a report's series."""
    shown = {}
    for panel, path in panels.items():
        group, _, line = path.partition("/")
        shown[panel] = {name: made.series[group][line] for name, made in reports.items() if line in made.series[group]}
    return charts.lines(title, shown, unit=next(iter(reports.values())).unit)


def over_time(made: Report) -> str:
    """The plots of one simulation."""
    return charts.lines(f"{made.title}: over time", made.series, unit=made.unit)


def _body(made: Report) -> list[str]:
    parts = [f"<p>{escape(line)}</p>" for line in summary(made)]
    rows = {"all": made.everyone} | (made.tenants if len(made.tenants) > 1 else {})
    head = (
        "", "requests", "served", "refused", "TTFT p50", "p95", "p99", "gap p50", "p95", "p99", "E2E p50", "p95", "p99",
        "cached", "good" if made.objectives else "answered",
    )  # fmt: skip
    parts.append(table(head, (_row(name, made, one) for name, one in rows.items())))
    parts += [_svg_per_panel(made)]
    if made.notes:
        scale = {"s": 1.0, "min": 60.0, "h": 3600.0}[made.unit]
        listed = ((f"{at / scale:,.2f} {made.unit}", note) for at, note in made.notes[:MAX_NOTES])
        more = len(made.notes) - MAX_NOTES
        parts.append(
            f"<details><summary>What happened to the fleet ({len(made.notes)})</summary>{table(('when', 'what'), listed)}"
            + (f"<p>and {more} more</p>" if more > 0 else "")
            + "</details>"
        )
    parts.append(table(("assumption", ""), made.assumptions.items()))
    return parts


def _row(name: str, made: Report, one: Figures) -> tuple[str, ...]:
    tier = made.tiers.get(name)
    return (
        name if tier is None or name == "all" else f"{name} ({tier})",
        f"{one.requests:,}",
        f"{one.served:,}",
        f"{one.refused:,}",
        *(duration(one.ttft_s, part) for part in ("p50", "p95", "p99")),
        *(duration(one.gap_s, part) for part in ("p50", "p95", "p99")),
        *(duration(one.latency_s, part) for part in ("p50", "p95", "p99")),
        share(one.hit_rate),
        f"{one.good_share:.1%}",
    )


def _svg_per_panel(made: Report) -> str:
    """A chart of its own for each panel, so that each has its own legend."""
    return "\n".join(
        charts.lines(panel, {"": series}, unit=made.unit)
        for panel, series in made.series.items()
        if any(series.values())
    )


__all__ = ["money", "over_time", "overlay", "render", "render_comparison"]
