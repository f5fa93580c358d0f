"""A plan as one HTML page: the tables of the terminal, and charts. Nothing in it is fetched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from penstock.bench.page import STYLE
from penstock.cli import plan_charts, plan_table
from penstock.planning.candidate import Candidate, objectives
from penstock.planning.plan import Plan

_MORE_STYLE = """
body { max-width: 900px; } h2 { font-size: 1.05rem; margin-top: 2rem; } svg { max-width: 100%; }
table.words td { text-align: left; vertical-align: top; } tr.best td { font-weight: 600; }
tr.total td { font-weight: 600; } table { font-size: 14px; } td:first-child { white-space: nowrap; }
details { margin: 1rem 0; } summary { cursor: pointer; }
"""
_ROWS = 10


def render(plan: Plan) -> str:
    title = f"Plan: {plan.shape.name}"
    charts = plan_charts.draw(plan)
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(plan_table.headline(plan))}.</p>", _load(plan)]
    parts += [f"<h2>Deployments that keep {escape(objectives(plan.slo))}</h2>", _deployments(plan)]
    parts.append(charts.get("cost", ""))
    if plan.best is not None:
        parts += ["<h2>The cheapest</h2>", _words(plan_table.summary(plan, plan.best))]
        parts += [charts.get("concurrency", ""), charts.get("day", "")]
        parts += ["<h2>Bill of a month</h2>", _bill(plan.best)]
    if plan.api is not None:
        parts += ["<h2>Against an API</h2>", _words(plan_table.api_lines(plan.api, plan)), charts["break-even"]]
    if "sensitivity" in charts:
        parts += ["<h2>What the bill depends on</h2>", charts["sensitivity"]]
    if plan.rejected:
        out = _words((one.label, one.reason) for one in plan.rejected)
        count = plan_table.counted(len(plan.rejected), "deployment")
        parts.append(f"<details><summary>{count} out, and why</summary>{out}</details>")
    rows = ((one.what, one.value, one.source) for one in plan.assumptions)
    parts += ["<h2>Assumptions</h2>", _words(rows, ("what", "value", "source"))]
    style = STYLE + _MORE_STYLE
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{style}</style>'
    return "\n".join([head, *parts, "</html>"]) + "\n"


def _load(plan: Plan) -> str:
    work = plan.workload
    rows = []
    for name, rate in (("average", work.average), (f"peak, {work.peak_factor:g} x the average", work.peak)):
        figures = (rate.input_tokens, rate.cached_tokens, rate.output_tokens)
        rows.append((name, f"{rate.requests:,.2f}", *(f"{figure:,.0f}" for figure in figures)))
    users = f"{work.users:,.0f} users x {work.requests_per_user:g} requests a day"
    return f"<h2>Load: {users}</h2>" + _table(
        ("per second", "requests", "input tokens", "of them cached", "output tokens"), rows
    )


def _deployments(plan: Plan) -> str:
    """The cheapest of each layout; all of them folded away."""
    head = (
        "replica", "weights/KV", "replicas", "devices", "nodes", "req/s each", "TTFT ms", "ms/token", "$/month",
        "$/1M in", "$/1M out",
    )  # fmt: skip
    listed = plan_table.shown(plan)[:_ROWS]
    table = _table(head, map(_figures, listed), {0: "best"})
    if len(listed) == len(plan.candidates):
        return table
    every = _table(head, map(_figures, plan.candidates))
    return f"{table}<details><summary>All {len(plan.candidates)} deployments</summary>{every}</details>"


def _figures(candidate: Candidate) -> tuple[str, ...]:
    fleet, now, tokens = candidate.fleet, candidate.steady, candidate.tokens
    return (
        plan_table.layout(candidate.deployment),
        plan_table.formats(candidate.deployment),
        f"{fleet.replicas:,}",
        f"{fleet.devices:,}",
        f"{fleet.nodes:,}",
        f"{candidate.most.requests_per_s:,.2f}",
        f"{now.ttft_s * 1e3:,.0f}",
        f"{now.itl_s * 1e3:,.1f}",
        f"{candidate.monthly:,.0f}",
        f"{tokens.input:,.3f}",
        f"{tokens.output:,.3f}",
    )


def _bill(best: Candidate) -> str:
    rows = [(name, *(f"{figure:,.0f}" for figure in figures)) for name, *figures in plan_table.bill_rows(best)]
    hours = ("GPU hours", f"{best.static.gpus.hours:,.0f}", f"{best.autoscaled.gpus.hours:,.0f}")
    return _table(("dollars", "static", "autoscaled"), [*rows, hours], {len(rows) - 1: "total"})


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], classes: dict[int, str] | None = None) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = ""
    for index, row in enumerate(rows):
        name = (classes or {}).get(index)
        opened = "<tr>" if name is None else f'<tr class="{name}">'
        body += opened + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
    return f"<table><tr>{cells}</tr>{body}</table>"


def _words(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """A table of sentences rather than figures."""
    return _table(head, rows).replace("<table>", '<table class="words">')
