"""`penstock bench adapters`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import (
    Device,
    DType,
    DTypeOption,
    Json,
    Model,
    Shape,
    Threads,
    Weights,
    WeightsOption,
    console,
)


def adapters(
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once; repeat for several. Default: 1, 8, 64.")
    ] = None,
    count: Annotated[
        list[int] | None, typer.Option(min=1, help="Adapters they share; repeat for several. Default: 1, 20.")
    ] = None,
    rank: Annotated[int, typer.Option(min=1, max=512, help="Rank of the adapters.")] = 16,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens that each request generates.")] = 64,
    model: Model = "smollm2-135m",
    shape: Shape = None,
    repeat: Annotated[int, typer.Option(min=1, help="Turns of each side; medians are shown.")] = 3,
    device: Device = "auto",
    dtype: DTypeOption = DType.auto,
    weights: WeightsOption = Weights.auto,
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """
    What LoRA adapters cost: decode steps with and without them, on every linear and on PEFT's default targets.

    Examples:

        penstock bench adapters

        penstock bench adapters --shape llama-8b --device cuda --repeat 3

        penstock bench adapters --batch 16 --count 8 --json results.json
    """
    from penstock.bench import adapter_cost, offline

    settings = offline.OfflineBenchSettings(
        model=model,
        shape=shape,
        device=device,
        dtype=dtype.value,
        weights=weights.value,
        threads=threads,
        repeat=repeat,
        adapter_rank=rank,
    )
    adapter_cost.main(settings, batch or [1, 8, 64], count or [1, 20], tokens, json_file, console())
