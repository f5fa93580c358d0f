"""`penstock bench watermark`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.bench.options import Device, Json, Model, Threads, console


def watermark(
    model: Model = "smollm2-135m",
    texts: Annotated[int, typer.Option(min=1, help="Answers to generate with a watermark, and as many without.")] = 48,
    tokens: Annotated[int, typer.Option(min=16, help="Length of each.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.01, max=2.0, help="Of the answers.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0, help="Of the answers.")] = 1.0,
    prose: Annotated[
        list[Path] | None, typer.Option(help="Files or folders (*.md, *.txt) with text of others; may be repeated.")
    ] = None,
    keys: Annotated[int, typer.Option(min=1, help="Keys that each text of others is tested with.")] = 20,
    device: Device = "auto",
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """
    How often the watermark is found in watermarked answers, by length, and in text without it.

    Examples:

        penstock bench watermark --prose docs

        penstock bench watermark --temperature 0.7 --top-p 0.9 --texts 100 --json results.json
    """
    from penstock.bench import watermark as measured
    from penstock.engine.config import EngineConfig
    from penstock.sources.resolve import resolve

    config = EngineConfig(
        model=str(resolve(model)), name=model, device=device, threads=threads, max_running=16, max_model_len=1024
    )
    settings = measured.Settings(texts, tokens, temperature, top_p, keys)
    measured.main(config, settings, prose=prose or [], json_file=json_file, console=console())
