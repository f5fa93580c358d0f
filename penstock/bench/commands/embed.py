"""`penstock bench embed`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import Device, Json, Model, Threads, console


def embed(
    model: Model = "minilm",
    texts: Annotated[int, typer.Option(min=1, help="Texts in each round.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Texts in a batch of transformers, sorted by length.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians are compared.")] = 3,
    device: Device = "auto",
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """
    Texts per second of an encoder engine, and of transformers with the same weights, alternating.

    Texts are random tokens with lengths like those of a search index: most of them short, some long.

    Examples:

        penstock bench embed

        penstock bench embed --texts 1000 --batch 64 --threads 1
    """
    from penstock.bench import embed as measured

    settings = measured.EmbedBenchSettings(model, texts, batch, rounds, device, threads)
    measured.main(settings, json_file, console())
