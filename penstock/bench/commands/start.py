"""`penstock bench start`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import Device, Json, Model, console


def start(
    model: Model = "smollm2-135m",
    shape: Annotated[str | None, typer.Option(help="Random weights of a named shape instead of a model.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Set any key of the server.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Starts; the first is shown on its own.")] = 3,
    device: Device = "auto",
    json_file: Json = None,
) -> None:
    """
    Seconds from starting `penstock serve` to ready and to the first answer, and where they go.

    Examples:

        penstock bench start

        penstock bench start --shape llama-8b --device cuda --repeat 3 --json start.json
    """
    from penstock.bench import start as starts

    chosen = starts.StartBenchSettings(
        model=model, device=device, repeat=repeat, shape=shape, serve=tuple(settings or ())
    )
    starts.main(chosen, json_file, console())
