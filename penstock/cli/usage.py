"""`penstock usage`: usage and cost from the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from penstock.cli.lists import Column, show
from penstock.cli.options import ConfigFile, Settings

Row = dict[str, str | int]
SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "cost")


def usage(
    by: Annotated[
        str, typer.Option(help="tenant, user, feature, model, adapter, tier, key, day, hour; several with commas.")
    ] = "tenant,model",
    since: Annotated[str, typer.Option(help="Start of the period: 24h, 30d, or a date.")] = "30d",
    until: Annotated[str | None, typer.Option(help="End of the period; by default now.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    output: Annotated[
        Literal["table", "json", "csv", "chart"], typer.Option("--output", "-o", help="table, json, csv or chart.")
    ] = "table",
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """
    Show usage and cost.

    Examples:

        penstock usage

        penstock usage --by tenant,user,feature --since 24h

        penstock usage --by day --since 30d -o chart

        penstock usage --by tenant,model,adapter --since 2026-11-01 --until 2026-12-01 -o csv > november.csv
    """
    rows = _rows(by, since, until, tenant, config_file, settings)
    if output == "chart":
        _chart(rows)
    else:
        show(_columns(rows), rows, output, empty="No usage in this period.")


def _rows(
    by: str, since: str, until: str | None, tenant: str | None, config_file: Path | None, settings: list[str] | None
) -> list[Row]:
    import asyncio

    from penstock.cli.terminal import flags
    from penstock.config import load
    from penstock.metering.ledger import Ledger
    from penstock.metering.reports import dimensions, moment, rows
    from penstock.storage import open_database

    config = load(config_file, flags=flags(settings))
    names = dimensions(by)

    async def run() -> list[Row]:
        database = await open_database(config.store.url)
        try:
            ledger = Ledger(database)
            await ledger.prepare()
            end = None if until is None else moment(until)
            return rows(names, await ledger.totals(names, since=moment(since), until=end, tenant=tenant))
        finally:
            await database.close()

    return asyncio.run(run())


def _columns(rows: list[Row]) -> list[Column[Row]]:
    """What the rows are by stays; of the figures, cost goes last."""
    ranks = {"reasoning_tokens": 4, "cached_tokens": 3, "requests": 2}
    return [
        Column(name, lambda row, name=name: row[name], rank=ranks.get(name, int(name in SUMS)))  # type: ignore[misc]
        for name in (rows[0] if rows else ())
    ]


def _chart(rows: list[Row]) -> None:
    """A bar per row: its cost, or its tokens when nothing has a price."""
    from rich.bar import Bar
    from rich.table import Table

    from penstock.cli.terminal import stdout

    if not rows:
        typer.echo("No usage in this period.")
        return
    paid = any(float(row["cost"]) for row in rows)
    pairs: list[tuple[str, float]] = []
    for row in rows:
        label = " ".join(str(value) or "-" for name, value in row.items() if name not in SUMS)
        pairs.append((label, float(row["cost"] if paid else int(row["prompt_tokens"]) + int(row["completion_tokens"]))))
    if all(label[:2].isdigit() for label, _ in pairs):
        pairs.sort()  # days and hours in chronological order
    largest = max(max(size for _, size in pairs), 1e-12)
    grid = Table(box=None, pad_edge=False, show_header=False)
    for label, size in pairs:
        shown = f"${_money(size)}" if paid else f"{size:,.0f} tokens"
        grid.add_row(label, Bar(largest, 0, size, width=40), shown)
    stdout().print(grid)


def _money(dollars: float) -> str:
    """Small models cost millionths of a dollar a day; those have digits, too."""
    from decimal import Decimal

    return f"{dollars:,.4f}" if dollars >= 0.01 or not dollars else f"{Decimal(f'{dollars:.2g}'):f}"
