"""The report of a simulation, or of several on the same traffic, as one HTML page. Nothing in it is fetched."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from penstock.bench import charts
from penstock.bench.page import document, table
from penstock.simulation.report import Report, cells, summary

MAX_NOTES = 200
STYLE = """<style>
body { max-width: 1080px; } h2 { font-size: 1.1rem; margin-top: 2.5rem; } p { margin: .3rem 0; }
.figures { overflow-x: auto; } .figures td, .figures th { white-space: nowrap; padding: .25rem .6rem; }
.facts td { text-align: left; } svg { display: block; margin-top: 1.2rem; max-width: 760px; }
</style>"""


def render(made: Report) -> str:
    """One simulation."""
    return document(made.title, [STYLE, f"<h1>{escape(made.title)}</h1>", *_body(made)])


def render_comparison(title: str, reports: Mapping[str, Report], head: str) -> str:
    """Several: what differs first (`head`), then each by itself."""
    parts = [STYLE, f"<h1>{escape(title)}</h1>", f'<div class="figures">{head}</div>']
    for name, made in reports.items():
        parts += [f"<h2>{escape(name)}</h2>", *_body(made)]
    return document(title, parts)


def overlay(title: str, reports: Mapping[str, Report], panels: Mapping[str, str]) -> str:
    """A chart over time with a line per report; `panels` maps a panel's title to `panel/line` of a report's series."""
    shown = {}
    for panel, path in panels.items():
        group, _, line = path.partition("/")
        shown[panel] = {name: made.series[group][line] for name, made in reports.items() if line in made.series[group]}
    first = next(iter(reports.values()))
    return charts.lines(title, shown, unit=first.unit, shaded=first.shaded)


def over_time(made: Report) -> str:
    """The plots of one simulation."""
    return charts.lines(f"{made.title}: over time", made.series, unit=made.unit, shaded=made.shaded)


def _body(made: Report) -> list[str]:
    parts = [f"<p>{escape(line)}</p>" for line in summary(made)]
    rows = {"all": made.everyone} | (made.tenants if len(made.tenants) > 1 else {})
    head = (
        "p50 / p95 / p99", "requests", "served", "refused", "TTFT, ms", "gap, ms", "E2E, s", "cached",
        "good" if made.objectives else "answered",
    )  # fmt: skip
    parts.append(f'<div class="figures">{table(head, (cells(made, name, one) for name, one in rows.items()))}</div>')
    parts += [_svg_per_panel(made)]
    if made.notes:
        scale = {"s": 1.0, "min": 60.0, "h": 3600.0}[made.unit]
        listed = ((f"{at / scale:,.2f} {made.unit}", note) for at, note in made.notes[:MAX_NOTES])
        more = len(made.notes) - MAX_NOTES
        parts.append(
            f'<details class="facts"><summary>What happened to the fleet ({len(made.notes)})</summary>'
            + table(("when", "what"), listed)
            + (f"<p>and {more} more</p>" if more > 0 else "")
            + "</details>"
        )
    parts.append(f'<div class="facts">{table(("assumption", ""), made.assumptions.items())}</div>')
    return parts


def _svg_per_panel(made: Report) -> str:
    """A chart of its own for each panel, so that each has its own legend."""
    return "\n".join(
        charts.lines(panel, {"": series}, unit=made.unit, shaded=made.shaded)
        for panel, series in made.series.items()
        if any(series.values())
    )
