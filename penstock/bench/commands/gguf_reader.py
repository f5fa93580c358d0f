"""`penstock bench gguf-reader`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import Json, Model, console


def gguf_reader(
    model: Model = "smollm2-135m",
    rounds: Annotated[int, typer.Option(min=1, help="Readings of each side; medians are shown.")] = 5,
    json_file: Json = None,
) -> None:
    """
    Our GGUF reader beside the `gguf` package: time and memory to open a file and to read its vocabulary.

    Examples:

        penstock bench gguf-reader

        penstock bench gguf-reader -m model.gguf --rounds 9
    """
    from penstock.bench.libraries import gguf_reader as measured

    measured.main(measured.GgufReaderBenchSettings(model, rounds), json_file, console())
