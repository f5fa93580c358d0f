"""`penstock bench semantic-cache`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import console


def semantic_cache(
    threshold: Annotated[float, typer.Option(min=0.0, max=1.0, help="Least similarity of a match.")] = 0.8,
    show: Annotated[bool, typer.Option("--show", help="Print errors on the pairs that are not held out.")] = False,
) -> None:
    """
    How often the semantic cache is wrong, and how often it helps, on pairs of questions written for it.

    Examples:

        penstock bench semantic-cache

        penstock bench semantic-cache --threshold 0.7 --show
    """
    from penstock.bench import semantic_cache as measured

    if not measured.main(threshold, show, console()):
        raise typer.Exit(1)
