"""`penstock bench http`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import DEFAULT_MODEL, Device, Json, Model, console, finite


def http(
    workload: Annotated[
        list[str] | None,
        typer.Option("--workload", "-w", help="Workload; repeat for several. Default: c16, c64 if there is no --rate."),
    ] = None,
    model: Model = DEFAULT_MODEL,
    shape: Annotated[str | None, typer.Option(help="Random weights of a named shape instead of a model.")] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option("--rate", min=0.001, callback=finite, help="Open loop, requests per second; repeat for several."),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Workload whose lengths the requests of open loops have.")] = "mix",
    offline: Annotated[bool, typer.Option("--offline/--no-offline", help="Also run the engine alone.")] = True,
    settings: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Set any key of the server.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Turns of each side; medians are shown.")] = 3,
    device: Device = "auto",
    json_file: Json = None,
) -> None:
    """
    The same workloads offline and through HTTP, alternating on this machine: the ratio, and CPU time per token.

    Examples:

        penstock bench http

        penstock bench http -w c16 -w c64 --repeat 5 --json results.json

        penstock bench http --shape llama-8b --device cuda --no-offline -w b64 -w long30k --rate 12 --rate 20
    """
    from penstock.bench import through_http, workloads

    names = workload or ([] if rate else ["c16", "c64"])
    shape = workloads.shape_of(names, shape, model_is_default=model == DEFAULT_MODEL)
    chosen = through_http.ThroughHttpBenchSettings(
        model=model,
        device=device,
        repeat=repeat,
        shape=shape,
        offline=offline,
        rates=tuple(rate or ()),
        lengths=lengths,
        serve=tuple(settings or ()),
    )
    through_http.main(chosen, names, json_file, console())
