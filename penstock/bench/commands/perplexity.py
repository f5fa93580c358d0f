"""`penstock bench perplexity`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.bench.options import Device, Json, Model, Threads, console


def perplexity(
    model: Model = "smollm2-135m",
    form: Annotated[
        list[str] | None,
        typer.Option("--form", "-f", help="WEIGHTS, WEIGHTS/ACTIVATIONS, or either with :KV behind it; repeatable."),
    ] = None,
    text_file: Annotated[
        Path | None, typer.Option("--text", exists=True, dir_okay=False, help="Score this file instead.")
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """
    Perplexity of a model in several weight formats on a fixed text, against its dense format.

    Examples:

        penstock bench perplexity

        penstock bench perplexity -f auto -f int8 -f int4/int8

        penstock bench perplexity -f dense:int8 -f dense:fp8

        penstock bench perplexity -m hf:org/name --text notes.txt --json results.json
    """
    from penstock.bench import perplexity as measured
    from penstock.engine.config import EngineConfig
    from penstock.sources.resolve import resolve
    from penstock.text import load_text

    path = resolve(model)
    measured.main(
        EngineConfig(model=str(path), name=model, device=device, threads=threads),
        load_text(path).encode,
        [measured.Form.parse(name) for name in form or ["auto"]],
        None if text_file is None else text_file.read_text(encoding="utf-8"),
        json_file,
        console(),
    )
