"""`penstock bench search-speed`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import EncoderWeights, EncoderWeightsOption, console


def search_speed(
    library: Annotated[
        str | None, typer.Option(help="Folder, or a database's URL, that keeps the collection for the next run.")
    ] = None,
    chunks: Annotated[int, typer.Option(min=100, help="Size of the collection.")] = 100_000,
    at_once: Annotated[int, typer.Option(min=1, help="Searches at one time.")] = 1,
    weights: EncoderWeightsOption = EncoderWeights.auto,
) -> None:
    """
    How fast a collection of 100,000 chunks is searched, step by step.

    Takes two or three minutes, most of them for the index.

    Examples:

        penstock bench search-speed

        penstock bench search-speed --library FOLDER --chunks 20000 --at-once 4

        penstock bench search-speed --library postgresql://user@host/name
    """
    from penstock.bench.knowledge import search_speed as measured

    if not measured.main(library, chunks, at_once, weights.value, console()):
        raise typer.Exit(1)
