"""Lists of things on a terminal or for a program: one description of the columns, shown as a table, JSON or CSV.

A table never cuts an id: where it is wider than the terminal, the columns that matter least are left out and named. In
a pipe there is no width, so every column is there, one line per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
Format = Literal["table", "json", "csv"]
Output = Annotated[Format, typer.Option("--output", "-o", help="table, json or csv.")]
GAP = 2
"""Spaces between columns."""
LEAST_TEXT = 16
"""Columns that may be folded keep at least this width, or are left out."""


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """`value`: what programs get. `text`: what people read, by default the value. The higher `rank`, the sooner the
    column is left out on a narrow terminal; 0 stays. `fold`: long text may take several lines."""

    name: str
    value: Callable[[T], Any]
    text: Callable[[T], str] | None = None
    rank: int = 1
    fold: bool = False

    def cell(self, row: T) -> str:
        return self.text(row) if self.text is not None else plain(self.value(row))


def show(columns: Sequence[Column[T]], rows: Iterable[T], output: Format, *, empty: str = "") -> None:
    """Prints `rows`. `empty`: what a person reads instead of a table without rows."""
    found = list(rows)
    if output == "json":
        import json

        from penstock.telemetry.printable import printable_json

        entries = [{_key(column): column.value(row) for column in columns} for row in found]
        typer.echo(printable_json(json.dumps(entries, indent=2, ensure_ascii=False), keep="\n"))
    elif output == "csv":
        import csv
        import sys

        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([_key(column) for column in columns])
        writer.writerows([[_field(column.value(row)) for column in columns] for row in found])
    elif not found and empty:
        typer.echo(empty)
    else:
        from penstock.cli.terminal import stdout

        _table(stdout(), columns, found)


def plain(value: Any) -> str:
    """A value as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None or value == "" else str(value)


def fitting(widths: Sequence[int], ranks: Sequence[int], room: int) -> list[int]:
    """The positions of the columns that fit into `room`: those of the highest rank go first, the last of them first."""
    kept = list(range(len(widths)))
    while sum(widths[at] for at in kept) + GAP * (len(kept) - 1) > room:
        spare = [at for at in kept if ranks[at] > 0]
        if not spare:
            break
        kept.remove(max(spare, key=lambda at: (ranks[at], at)))
    return kept


def _table(console: Console, columns: Sequence[Column[T]], rows: Sequence[T]) -> None:
    from rich.cells import cell_len
    from rich.table import Table

    cells = [[column.cell(row) for column in columns] for row in rows]
    full = [max([cell_len(column.name), *(cell_len(line[at]) for line in cells)]) for at, column in enumerate(columns)]
    kept = list(range(len(columns)))
    if console.is_terminal:
        least = [min(w, LEAST_TEXT) if column.fold else w for w, column in zip(full, columns, strict=True)]
        kept = fitting(least, [column.rank for column in columns], console.width)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for at in kept:
        found = [columns[at].value(row) for row in rows]
        numbers = any(map(_number, found)) and all(value is None or _number(value) for value in found)
        folds = columns[at].fold and console.is_terminal
        table.add_column(
            columns[at].name,
            justify="right" if numbers else "left",
            no_wrap=not folds,
            overflow="fold",
            min_width=None if folds else full[at],
        )
    for line in cells:
        table.add_row(*(line[at] for at in kept))
    if not console.is_terminal:
        console.width = max(console.width, sum(full) + GAP * len(full))
    console.print(table, highlight=False, crop=False)
    gone = [column.name for at, column in enumerate(columns) if at not in kept]
    if gone:
        from penstock.cli.terminal import stderr

        stderr().print(f"not shown here: {', '.join(gone)}; use a wider terminal or -o json", style="dim", markup=False)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _key(column: Column[T]) -> str:
    return column.name.replace(" ", "_")


def _field(value: Any) -> Any:
    """For a spreadsheet: lists with spaces, and nothing that it would run as a formula."""
    from penstock.telemetry.printable import printable

    if isinstance(value, list | tuple):
        value = " ".join(map(str, value))
    if isinstance(value, str):
        value = printable(value)
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return "" if value is None else value
