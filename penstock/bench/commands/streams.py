"""`penstock bench streams`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import Json, console


def streams(
    count: Annotated[int, typer.Option("--streams", min=1, help="Streams that are open at once.")] = 10_000,
    interval: Annotated[float, typer.Option(min=0.01, help="Seconds between two tokens of a stream.")] = 1.0,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long all streams are open at least.")] = 20.0,
    ramp: Annotated[float, typer.Option(min=1.0, help="Connections opened per second.")] = 500.0,
    slow: Annotated[int, typer.Option(min=0, help="Streams that stop reading for a while.")] = 20,
    workers: Annotated[int, typer.Option(min=1, help="Gateway processes.")] = 1,
    json_file: Json = None,
) -> None:
    """
    Ten thousand streams at once that steadily receive tokens, some of them not reading: is anything lost?

    Examples:

        penstock bench streams

        penstock bench streams --streams 2000 --interval 0.2 --workers 2 --json streams.json
    """
    from penstock.bench.gateway import streams as measured

    settings = measured.StreamsBenchSettings(count, interval, seconds, ramp, slow, workers)
    if not measured.main(settings, json_file, console()):
        raise typer.Exit(1)
