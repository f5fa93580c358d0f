"""`penstock bench scrape`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import Json, console


def scrape(
    every: Annotated[float, typer.Option(min=0.001, help="Seconds between two scrapes.")] = 0.05,
    streams: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each request.")] = 128,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each turn.")] = 2048,
    features: Annotated[int, typer.Option(min=1, help="Features that requests name, each a series of its own.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each side.")] = 3,
    workers: Annotated[int, typer.Option(min=1, help="Gateway processes.")] = 1,
    json_file: Json = None,
) -> None:
    """
    What scraping `/metrics` every 50 ms costs a gateway under load: tokens per second with and without, in turn.

    Examples:

        penstock bench scrape

        penstock bench scrape --features 1000 --workers 2 --json scrape.json
    """
    from penstock.bench.gateway import scrape as measured

    settings = measured.ScrapeBenchSettings(every, streams, tokens, requests, features, rounds, workers)
    if not measured.main(settings, json_file, console()):
        raise typer.Exit(1)
