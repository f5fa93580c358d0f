"""`penstock bench speculation`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.bench.options import Device, Json, Model, Rounds, Threads, console


def speculation(
    model: Model = "smollm2-135m",
    draft_model: Annotated[
        str | None,
        typer.Option("--draft-model", help="Draft with this model or EAGLE-3 head instead of n-grams of the text."),
    ] = None,
    mtp: Annotated[bool, typer.Option("--mtp", help="Draft with the MTP layer of the checkpoint.")] = False,
    shape: Annotated[
        str | None, typer.Option(help="Random weights of a named shape instead of a model; needs --acceptance.")
    ] = None,
    acceptance: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Draft the known text, right with this chance."),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option("--workload", "-w", help="code-edit, quote, text, code or random; all by default."),
    ] = None,
    depth: Annotated[int, typer.Option(min=1, max=32, help="Draft tokens per sequence and step, at most.")] = 6,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    rounds: Rounds = 3,
    device: Device = "auto",
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """
    Tokens per second with and without speculation, alternating, on texts that repeat and on random ones.

    Examples:

        penstock bench speculation

        penstock bench speculation -w code-edit -w quote --rounds 5

        penstock bench speculation -m hf:org/large --draft-model hf:org/small

        penstock bench speculation --draft-model head -w text -w code

        penstock bench speculation --shape llama-8b --device cuda --acceptance 0.7
    """
    from penstock.bench import speculation as measured
    from penstock.engine.backends.select import pick_device, pick_dtype
    from penstock.engine.config import EngineConfig
    from penstock.errors import ConfigError
    from penstock.sources.resolve import resolve
    from penstock.text import load_text

    if shape is not None and acceptance is None:
        raise ConfigError("random weights write nothing that could be drafted: give --acceptance with --shape")
    checkpoint, encode, path = None, None, shape or ""
    if shape is not None:
        where = pick_device(device)
        checkpoint = measured.decisive(shape, where, pick_dtype("auto", where))
    else:
        path = str(resolve(model))
        encode = load_text(Path(path)).encode
    measured.main(
        EngineConfig(
            model=path,
            name=shape or model,
            device=device,
            threads=threads,
            max_running=64,
            speculation="auto" if draft_model is not None else "mtp" if mtp else "ngram",
            speculation_depth=depth,
            draft_model=None if draft_model is None else str(resolve(draft_model, pickled=True)),
        ),
        encode,
        checkpoint=checkpoint,
        rounds=rounds,
        output_len=output_len,
        temperature=temperature,
        acceptance=acceptance,
        only=workload or (),
        json_file=json_file,
        console=console(),
    )
