"""`penstock bench compare`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import Device, InputLen, Json, Model, OutputLen, Rounds, Threads, console


def compare(
    model: Model = "smollm2-135m",
    batch: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 16,
    input_len: InputLen = 128,
    output_len: OutputLen = 128,
    rounds: Rounds = 3,
    device: Device = "auto",
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """
    This engine against `transformers` generate, alternating on the same machine, and the ratio.

    Examples:

        penstock bench compare

        penstock bench compare --batch 16 --rounds 5 --json results.json
    """
    from penstock.bench import compare as comparison

    settings = comparison.CompareBenchSettings(
        model=model,
        batch=batch,
        input_len=input_len,
        output_len=output_len,
        rounds=rounds,
        device=device,
        threads=threads,
    )
    comparison.main(settings, json_file, console())
