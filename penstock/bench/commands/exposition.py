"""`penstock bench exposition`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import Json, console


def exposition(
    series: Annotated[int, typer.Option(min=1, help="Label combinations of a counter and a histogram.")] = 1000,
    changed: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share that changes between two scrapes.")] = 0.05,
    updates: Annotated[int, typer.Option(min=2, help="Updates of each turn.")] = 100_000,
    scrapes: Annotated[int, typer.Option(min=1, help="Scrapes of each turn.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each side; medians are shown.")] = 5,
    json_file: Json = None,
) -> None:
    """
    Our metrics beside `prometheus_client`: the time of an update and of a scrape, with the same series.

    Examples:

        penstock bench exposition

        penstock bench exposition --series 4000 --changed 0.5
    """
    from penstock.bench.libraries import exposition as measured

    settings = measured.ExpositionBenchSettings(series, changed, updates, scrapes, rounds)
    measured.main(settings, json_file, console())
