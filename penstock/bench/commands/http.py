"""`penstock bench http`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import Device, Json, Model, console


def http(
    workload: Annotated[
        list[str] | None,
        typer.Option("--workload", "-w", help="Closed-loop workload; repeat for several. Default: c16, c64."),
    ] = None,
    model: Model = "smollm2-135m",
    repeat: Annotated[int, typer.Option(min=1, help="Turns of each side; medians are shown.")] = 3,
    device: Device = "auto",
    json_file: Json = None,
) -> None:
    """
    The same workloads offline and through HTTP, alternating on this machine: the ratio, and CPU time per token.

    Examples:

        penstock bench http

        penstock bench http -w c16 -w c64 --repeat 5 --json results.json
    """
    from penstock.bench import through_http

    settings = through_http.ThroughHttpBenchSettings(model=model, device=device, repeat=repeat)
    through_http.main(settings, workload or ["c16", "c64"], json_file, console())
