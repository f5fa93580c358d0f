"""`penstock bench shard`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import (
    Device,
    Json,
    KVDType,
    KVDTypeOption,
    Threads,
    Weights,
    WeightsOption,
    console,
)


def shard(
    shape: Annotated[str, typer.Option(help="The whole model, as a named shape.")] = "llama-70b",
    tensor_parallel: Annotated[int, typer.Option(min=2, help="Shards of every layer.")] = 8,
    batch: Annotated[list[int] | None, typer.Option("--batch", "-b", help="Sequences; repeat for several.")] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of context of each.")] = 512,
    link: Annotated[float, typer.Option(min=0.1, help="GB/s between two devices, each way.")] = 450.0,
    latency: Annotated[float, typer.Option(min=0.0, help="Microseconds of a small all-reduce.")] = 10.0,
    device: Device = "auto",
    weights: WeightsOption = Weights.auto,
    kv_dtype: KVDTypeOption = KVDType.auto,
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """
    What tensor-parallel decode would take: one shard measured here, the sums between shards computed.

    Examples:

        penstock bench shard --device cuda

        penstock bench shard --shape llama-8b --tensor-parallel 2 -b 1 -b 64 --device cuda
    """
    import json

    from penstock.bench import shapes
    from penstock.bench.shard import Link, measure
    from penstock.engine.backends.select import pick_device
    from penstock.engine.config import EngineConfig

    batches = batch or [1, 16, 64]
    settings = EngineConfig(
        model=shape,
        device=str(pick_device(device)),
        weights=weights.value,
        kv_dtype=kv_dtype.value,
        threads=threads,
        max_running=max(batches),
        max_model_len=context + 256,
    )
    between = Link(link * 1e9, latency * 1e-6)
    rows = []
    out = console()
    out.print(f"{shape} in {tensor_parallel} shards: one measured on {settings.device}, the links computed")
    for step in measure(shapes.named(shape), tensor_parallel, batches, between, settings, context):
        rate = step.batch / step.step_s
        out.print(
            f"batch {step.batch}: shard {step.shard_s * 1e3:.2f} ms measured, "
            f"sums {step.sums_s * 1e3:.2f} ms computed: {step.step_s * 1e3:.2f} ms per step, {rate:,.0f} tokens/s"
        )
        rows.append({"batch": step.batch, "shard_s": step.shard_s, "sums_s": step.sums_s, "step_s": step.step_s})
    if json_file is not None:
        json_file.write_text(json.dumps({"shape": shape, "shards": tensor_parallel, "computed": rows}, indent=2))
