"""`penstock bench structure`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import Device, InputLen, Json, Model, OutputLen, Rounds, Threads, console


def structure(
    model: Model = "smollm2-135m",
    batch: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 16,
    input_len: InputLen = 32,
    output_len: OutputLen = 64,
    rounds: Rounds = 3,
    device: Device = "auto",
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """
    What following a JSON schema costs: tokens/s with and without it, and the time of a token mask.

    Examples:

        penstock bench structure

        penstock bench structure --batch 1 --output-len 128 --rounds 5
    """
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
        measured.StructureBenchSettings(batch=batch, input_len=input_len, output_len=output_len, rounds=rounds),
        json_file,
        console(),
    )
