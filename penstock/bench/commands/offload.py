"""`penstock bench offload`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import (
    Device,
    Json,
    KVDType,
    KVDTypeOption,
    Model,
    Shape,
    Threads,
    Weights,
    WeightsOption,
    console,
)


def offload(
    tokens: Annotated[int, typer.Option(min=64, help="Length of the conversation.")] = 2048,
    model: Model = "smollm2-135m",
    shape: Shape = None,
    repeat: Annotated[int, typer.Option(min=1, help="Returns; medians are shown.")] = 3,
    host_memory: Annotated[float, typer.Option(min=0.001, help="Host memory for KV blocks, in GiB.")] = 4.0,
    streams: Annotated[
        int, typer.Option(min=0, help="Also measure the gaps of so many streams while a conversation comes back.")
    ] = 0,
    device: Device = "auto",
    weights: WeightsOption = Weights.auto,
    kv_dtype: KVDTypeOption = KVDType.auto,
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """
    Resuming a conversation whose KV blocks are in host memory, against recomputing it.

    Examples:

        penstock bench offload

        penstock bench offload --tokens 4096 --kv-dtype int8

        penstock bench offload --tokens 4096 --streams 4

        penstock bench offload --shape llama-8b --device cuda --host-memory 4
    """
    from penstock.bench import offline
    from penstock.bench import offload as returning

    room = returning.NEW_TOKENS + returning.STREAMED
    settings = offline.OfflineBenchSettings(
        model=model,
        shape=shape,
        device=device,
        weights=weights.value,
        kv_dtype=kv_dtype.value,
        threads=threads,
        max_running=2 + streams,
        max_model_len=max(tokens + 2 * returning.NEW_TOKENS, room if streams else 0),
        num_blocks=(tokens + 2 * returning.NEW_TOKENS + streams * room) // 16 + 1,
        host_memory=round(host_memory * 2**30),
        repeat=repeat,
    )
    returning.main(settings, tokens, streams, json_file, console())
