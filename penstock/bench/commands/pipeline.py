"""`penstock bench pipeline`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import InputLen, Json, OutputLen, Rounds, console


def pipeline(
    stages: Annotated[int, typer.Option(min=2, help="Pipeline stages, each a process of one thread.")] = 2,
    layers: Annotated[int, typer.Option(min=1, help="Layers of each stage.")] = 4,
    hidden: Annotated[int, typer.Option(min=64, help="Width of the model; a multiple of 64.")] = 768,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that decode in one step.")] = 16,
    input_len: InputLen = 512,
    output_len: OutputLen = 48,
    rounds: Rounds = 3,
    json_file: Json = None,
) -> None:
    """
    How full a pipeline on CPU ranks is: its throughput against one stage alone, and against the model on one core.

    Examples:

        penstock bench pipeline

        penstock bench pipeline --stages 4 --hidden 1024 --layers 6 --json results.json
    """
    from penstock.bench import pipeline as measured

    settings = measured.PipelineBenchSettings(stages, layers, hidden, batch, output_len, input_len, rounds)
    measured.main(settings, json_file, console())
