"""`penstock bench structure`: here and not in `penstock.bench`, because grammars need the model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def structure(
    model: Annotated[str, typer.Option("--model", "-m", help="Model alias, source or path.")] = "smollm2-135m",
    batch: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 16,
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 32,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each side; medians are compared.")] = 3,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all cores by default.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures to FILE.")
    ] = None,
) -> None:
    """
    What following a JSON schema costs: tokens/s with and without it, and the time of a mask alone.

    Examples:

        penstock bench structure

        penstock bench structure --batch 1 --output-len 128 --rounds 5
    """
    from rich.console import Console

    from penstock.bench import structure as measured
    from penstock.engine.config import EngineConfig
    from penstock.sources.resolve import resolve
    from penstock.text import grammars
    from penstock.text.vocabulary import grammars_of

    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }

    def endless(tokens: int) -> str:
        return grammars.check(grammars.json_schema({"type": "array", "items": person, "minItems": tokens}))

    path = resolve(model)
    measured.main(
        EngineConfig(model=str(path), name=model, device=device, threads=threads, max_running=batch),
        grammars_of(path),
        endless,
        measured.Settings(batch=batch, input_len=input_len, output_len=output_len, rounds=rounds),
        json_file,
        Console(),
    )
