"""`penstock drill soak`: its progress, its table and its page."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from penstock.cli.lists import Format
    from penstock.fleet.drills.soak import Soak


def soak(
    minutes: float, source: Path | None, streams: int, settings: dict[str, Any], report: Path | None, output: Format
) -> None:
    import asyncio

    from penstock.cli.drill import Progress
    from penstock.fleet.drills.soak import soak as run
    from penstock.fleet.drills.throwaway import ThrowAway

    async def hold(progress: Progress) -> Soak:
        tell = progress.drill("soak")
        async with ThrowAway("machines", source, settings, faults=False, encoders=True, tell=tell) as fleet:
            return await run(fleet, minutes, streams, tell)

    with Progress(1) as progress:
        found = asyncio.run(hold(progress))
    _show(found, output)
    if report is not None:
        report.write_text(render(found))
        typer.echo(f"report: {report}", err=True)
    if not found.passed:
        raise typer.Exit(1)


def _show(found: Soak, output: Format) -> None:
    from penstock.cli.lists import Column, show
    from penstock.cli.terminal import stdout

    if output == "json":
        import json

        typer.echo(json.dumps(found.as_dict(), indent=2))
        return
    from penstock.fleet.drills.resources import Verdict

    columns: list[Column[Verdict]] = [
        Column("process", lambda verdict: verdict.name, rank=0),
        Column("MiB", lambda verdict: round(verdict.memory_mib, 1), rank=0),
        Column("MiB grown", lambda verdict: round(verdict.growth_mib, 1), rank=0),
        Column("allowed", lambda verdict: round(verdict.allowed_mib, 1)),
        Column("descriptors", lambda verdict: verdict.descriptors),
        Column("more", lambda verdict: verdict.more_descriptors),
        Column("problem", lambda verdict: "; ".join(verdict.problems), fold=True),
    ]
    show(columns, found.verdicts, output)
    if output == "table":
        console = stdout()
        for line in summary(found):
            console.print(line)
        for line in found.losses.lines()[:20]:
            console.print(f"lost {line}")


def summary(found: Soak) -> list[str]:
    """In words."""
    others = ", ".join(f"{count:,} {what}" for what, count in sorted(found.counts.items()))
    ledger = found.ledger
    lost = ", ".join(f"{count} {kind}" for kind, count in found.losses.counts().items() if count) or "nothing"
    return [
        f"{found.minutes:.1f} minutes: {found.streams:,} streams, {found.turns:,} turns of conversations, {others}; "
        f"{found.tokens:,} tokens.",
        f"Ledger: {ledger.charges:,} charges, {ledger.exact:,} of them equal to what a client was told, the rest of "
        "clients that left.",
        f"Lost: {lost}. Leaks: {'; '.join(found.leaks) or 'none'}.",
    ]


def render(found: Soak) -> str:
    """One HTML page."""
    from penstock.bench import charts
    from penstock.bench.page import document, table
    from penstock.bench.report import machine_line
    from penstock.cli.drill_page import STYLE

    title = f"Soak of {found.minutes:.0f} minutes"
    parts = [STYLE, f"<h1>{title}</h1>"]
    said = "nothing was lost, and nothing grows" if found.passed else "something was lost or leaks"
    parts.append(
        f'<p class="{"kept" if found.passed else "lost"}">{said}</p><p class="dim">{escape(machine_line())}</p>'
    )
    parts += [f"<p>{escape(line)}</p>" for line in summary(found)]
    head = ("process", "MiB", "grown after warm-up", "allowed", "descriptors", "more than after warm-up", "problem")
    rows = (
        (
            verdict.name,
            f"{verdict.memory_mib:,.0f}",
            f"{verdict.growth_mib:+,.1f}",
            f"{verdict.allowed_mib:,.0f}",
            f"{verdict.descriptors:,}",
            f"{verdict.more_descriptors:+,}",
            "; ".join(verdict.problems) or "none",
        )
        for verdict in found.verdicts
    )
    parts.append(f'<div class="figures">{table(head, rows)}</div>')
    lived = [process for process in found.processes if len(process.samples) > 3]
    panels = {
        "memory, MiB": {p.name: [(s.at / 60, s.memory_mib) for s in p.samples] for p in lived},
        "file descriptors": {p.name: [(s.at / 60, float(s.descriptors)) for s in p.samples] for p in lived},
    }
    for panel, series in panels.items():
        if series:
            parts.append(charts.lines(panel, {"": series}, unit="min"))
    if found.timeline:
        streams = {"": {"all clients": found.timeline}}
        parts.append(charts.lines("tokens per second in checked streams", streams, unit="min"))
    lost = found.losses.lines()
    parts.append('<ul class="lost">' + "".join(f"<li>{escape(line)}</li>" for line in lost[:50]) + "</ul>")
    return document(title, parts)
