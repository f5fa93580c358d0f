"""`penstock bench engine`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.bench.options import (
    DEFAULT_MODEL,
    Device,
    DType,
    DTypeOption,
    Json,
    KVDType,
    KVDTypeOption,
    Model,
    Threads,
    Weights,
    WeightsOption,
    console,
)


def engine(
    workload: Annotated[
        list[str] | None, typer.Option("--workload", "-w", help="Workload name; repeat for several. Default: c1, c16.")
    ] = None,
    model: Model = DEFAULT_MODEL,
    shape: Annotated[
        str | None, typer.Option(help="Random weights of a named shape instead of a model (see --list).")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each workload; medians are shown.")] = 1,
    warm_up: Annotated[bool, typer.Option("--warm-up/--no-warm-up", help="Run short requests first.")] = True,
    device: Device = "auto",
    dtype: DTypeOption = DType.auto,
    weights: WeightsOption = Weights.auto,
    kv_dtype: KVDTypeOption = KVDType.auto,
    fp8_attention: Annotated[bool, typer.Option("--fp8-attention", help="Long prompts attend in FP8 too.")] = False,
    threads: Threads = None,
    max_running: Annotated[int | None, typer.Option(min=1, help="Most sequences in one step.")] = None,
    token_budget: Annotated[int | None, typer.Option(min=1, help="Most tokens computed in one step.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Context window.")] = None,
    adapters: Annotated[
        int, typer.Option(min=0, help="Compare with and without this many random LoRA adapters, in the same run.")
    ] = 0,
    adapter_rank: Annotated[int, typer.Option(min=1, max=512, help="Rank of those adapters.")] = 16,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Ranks that split every layer.")] = 1,
    devices: Annotated[
        str | None, typer.Option(metavar="LIST", help="Device of each rank, like cuda:0,cuda:0.")
    ] = None,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Also show where steps spend their time: busy, idle, kernels."),
    ] = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measure what `penstock plan` and `penstock simulate` need to know of this machine, and write it to "
            "FILE. Factors that FILE already has for other weight formats are kept.",
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="With --calibrate: this device's name in the catalogue (`penstock plan --hardware list`)."),
    ] = None,
    json_file: Json = None,
    show: Annotated[bool, typer.Option("--list", help="List workloads and shapes, and stop.")] = False,
) -> None:
    """
    Offline benchmark of the engine: fixed workloads, tokens/s and the memory bandwidth reached.

    Examples:

        penstock bench engine

        penstock bench engine -w b1 -w c16 --repeat 5 --json results.json

        penstock bench engine --shape llama-8b --device cuda -w b1 -w b64 -w mix

        penstock bench engine --shape llama-8b --tensor-parallel 2 --devices cuda:0,cuda:0

        penstock bench engine -w c16 --profile

        penstock bench engine -w c16 --adapters 8 --repeat 3

        penstock bench engine --calibrate mine.yaml

        penstock bench engine --list
    """
    if calibrate is not None and (adapters or profile):
        raise typer.BadParameter("--calibrate runs without --adapters and --profile")
    if show:
        from penstock.bench.choices import show_choices

        show_choices(console())
        return

    from penstock.bench import offline, workloads

    names = workload or ([] if calibrate else ["c1", "c16"])
    shape = workloads.shape_of(names, shape, model_is_default=model == DEFAULT_MODEL)
    settings = offline.OfflineBenchSettings(
        model=model,
        shape=shape,
        device=device,
        dtype=dtype.value,
        weights=weights.value,
        kv_dtype=kv_dtype.value,
        fp8_attention=fp8_attention,
        threads=threads,
        max_running=max_running,
        token_budget=token_budget,
        max_model_len=max_model_len,
        repeat=repeat,
        warm_up=warm_up,
        adapters=adapters,
        adapter_rank=adapter_rank,
        tensor_parallel=tensor_parallel,
        devices=tuple(devices.split(",")) if devices else (),
        profile=profile,
    )
    if calibrate is not None:
        from penstock.bench import calibration

        calibration.main(settings, names, calibrate, hardware, json_file, console())
        return
    if hardware is not None:
        raise typer.BadParameter("--hardware is for --calibrate")
    offline.main(settings, names, json_file, console())
