"""`penstock bench overhead`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import Json, assignments, console


def overhead(
    rate: Annotated[float, typer.Option(min=1.0, help="Requests per second of the open loop.")] = 500.0,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each measurement.")] = 10.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each side in the closed loop.")] = 2,
    at_once: Annotated[int, typer.Option(min=1, help="Clients of the closed loop.")] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a completion.")] = 8,
    workers: Annotated[int, typer.Option(min=1, help="Gateway processes of Penstock.")] = 1,
    python: Annotated[
        list[str] | None, typer.Option(metavar="litellm=PATH", help="An interpreter that has LiteLLM's proxy.")
    ] = None,
    json_file: Json = None,
) -> None:
    """
    What a gateway adds to a request, and how many requests it passes on, beside LiteLLM's proxy in the same run.

    Examples:

        penstock bench overhead

        penstock bench overhead --python litellm=PATH/bin/python --seconds 20 --json overhead.json
    """
    from penstock.bench.gateway import overhead as measured

    litellm = assignments("--python", python, ("litellm",)).get("litellm")
    settings = measured.OverheadBenchSettings(rate, seconds, rounds, at_once, tokens, workers, litellm)
    if not measured.main(settings, json_file, console()):
        raise typer.Exit(1)
