"""`penstock bench admission-cost`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import Json, console


def admission_cost(
    streams: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 16,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 256,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each turn.")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each side.")] = 4,
    json_file: Json = None,
) -> None:
    """
    What the admission queue costs a gateway while nobody has to wait: CPU per request with it and without, in turn.

    Examples:

        penstock bench admission-cost

        penstock bench admission-cost --requests 5000 --rounds 8
    """
    from penstock.bench.gateway import admission_cost as measured

    settings = measured.AdmissionCostBenchSettings(streams, prompt, requests, rounds)
    measured.main(settings, json_file, console())
