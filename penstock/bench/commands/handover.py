"""`penstock bench handover`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import Json, KVDType, KVDTypeOption, Model, stderr
from penstock.machine import usable_cores


def handover(
    model: Model = "smollm2-135m",
    streams: Annotated[int, typer.Option(min=1, help="Streams that run meanwhile.")] = 8,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of each stream.")] = 256,
    tokens: Annotated[int, typer.Option(min=64, help="Length of the prompts that arrive.")] = 1024,
    every: Annotated[float, typer.Option(min=0.01, help="Seconds between two of them.")] = 4.0,
    prompts: Annotated[int, typer.Option(min=1, help="Most of them in a round.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each server.")] = 2,
    device: Annotated[
        list[str] | None, typer.Option(help="Device of the first engine of a server; again for the second.")
    ] = None,
    kv_dtype: KVDTypeOption = KVDType.auto,
    memory_share: Annotated[
        float | None, typer.Option(min=0.01, max=1, help="Part of a GPU's memory for each engine; there are four.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of each engine; half the cores by default.")
    ] = None,
    json_file: Json = None,
) -> None:
    """
    Streams while long prompts arrive: two plain replicas against one for prefill and one for decode, alternating.

    Also how fast KV blocks cross from engine to engine.

    Examples:

        penstock bench handover

        penstock bench handover --tokens 4096 --every 4 --kv-dtype int8

        penstock bench handover -m hf:Qwen/Qwen3-8B --device cuda:0 --device cuda:1 --memory-share 0.4 --tokens 16384
    """

    from penstock.bench import handover as measured

    settings = measured.HandoverBenchSettings(
        model=model,
        streams=streams,
        output_len=output_len,
        tokens=tokens,
        every_s=every,
        prompts=prompts,
        rounds=rounds,
        devices=tuple(device or ()),
        kv_dtype=kv_dtype.value,
        memory_share=memory_share,
        threads=threads or max(1, usable_cores() // 2),
    )
    measured.main(settings, json_file, stderr())
