"""`penstock bench table`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.bench.options import Json, console


def table(
    only: Annotated[
        list[str] | None, typer.Option("--only", "-o", metavar="RUN", help="This run; repeat for several (see --list).")
    ] = None,
    rows: Annotated[
        Path | None, typer.Option("--rows", metavar="FILE", help="Rows of your own. Default: those of one H200.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Turns of each run that has turns; medians are shown.")] = 3,
    seconds: Annotated[
        float | None, typer.Option(min=1.0, help="Begin no run that would not end within this time.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Show the runs and what they take, and exit.")] = False,
    json_file: Json = None,
) -> None:
    """
    Every row of the results of one H200 in one go: the figure, the peer's recorded one, the ratio, the bar.

    Exit status 1: a figure is missing, a bar is missed, or the peer is ahead.

    Examples:

        penstock bench table --list

        penstock bench table --json table.json

        penstock bench table -o dense -o experts --repeat 1 --seconds 300

        penstock bench table --rows my-rows.yaml
    """
    from penstock.bench import peer_table

    found, screen = peer_table.read_rows(rows), console()
    if listing:
        for name, run in found.runs.items():
            line = f"{name}: {len(run.rows)} rows, about {run.seconds(repeat):.0f} s: penstock bench {run.command}"
            screen.print(line, highlight=False, soft_wrap=True)
        return
    if not peer_table.main(found, only or [], repeat, seconds, json_file, screen):
        raise typer.Exit(1)
