"""`penstock bench perplexity`: here and not in `penstock.bench`, because it needs the model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def perplexity(
    model: Annotated[str, typer.Option("--model", "-m", help="Model alias, source or path.")] = "smollm2-135m",
    form: Annotated[
        list[str] | None,
        typer.Option("--form", "-f", help="WEIGHTS, WEIGHTS/ACTIVATIONS, or either with :KV behind it; repeatable."),
    ] = None,
    text_file: Annotated[
        Path | None, typer.Option("--text", exists=True, dir_okay=False, help="Score this file instead.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all cores by default.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures to FILE.")
    ] = None,
) -> None:
    """
    Perplexity of a model in several weight forms on a fixed text, against its dense form.

    Examples:

        penstock bench perplexity

        penstock bench perplexity -f auto -f int8 -f int4/int8

        penstock bench perplexity -f dense:int8 -f dense:fp8

        penstock bench perplexity -m hf:org/name --text notes.txt --json results.json
    """
    from rich.console import Console

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
        Console(),
    )
