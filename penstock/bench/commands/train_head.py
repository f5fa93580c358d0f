"""`penstock bench train-head`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.bench.options import Device, Json, Model


def train_head(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Texts to learn from; the standard library of Python by default.")
    ] = None,
    model: Model = "smollm2-135m",
    out: Annotated[Path, typer.Option(help="Folder of the head.")] = Path("head"),
    corpus: Annotated[
        Path | None, typer.Option(help="File of prompts in tokens: read if it exists, otherwise written.")
    ] = None,
    only_corpus: Annotated[bool, typer.Option("--only-corpus", help="Make the file of prompts and stop.")] = False,
    minutes: Annotated[float, typer.Option(min=0.01, help="Bound on generating, collecting and training.")] = 5.0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps, for the same head on every run; bounded by --minutes.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="How often each text is learned from, at most.")] = 6,
    seed: Annotated[int, typer.Option(help="Of generation and training.")] = 0,
    prompts: Annotated[int, typer.Option(min=16, help="Prompts to continue, at most.")] = 24576,
    length: Annotated[int, typer.Option(min=4, help="Tokens of a prompt.")] = 96,
    draft_vocab: Annotated[int, typer.Option(min=16, help="Tokens that it can draft: the most frequent.")] = 16384,
    measure: Annotated[bool, typer.Option("--measure", help="Then compare it with n-grams and with none.")] = False,
    device: Device = "auto",
    json_file: Json = None,
) -> None:
    """
    Train an EAGLE-3 head for a model on the model's own continuations of text and code.

    Examples:

        penstock bench train-head --device cuda --minutes 5 --measure

        penstock bench train-head notes/*.txt -m hf:org/model --out heads/model
    """
    from penstock.bench import train_head as training
    from penstock.sources.resolve import resolve

    path = str(resolve(model))
    found = training.corpus_of(path, corpus, files or (), prompts, length)
    if only_corpus:
        return
    options = training.Training(
        model=path,
        out=out,
        device=device,
        minutes=minutes,
        seed=seed,
        steps=steps,
        epochs=epochs,
        draft_vocab=draft_vocab,
        say=typer.echo,
    )
    training.run(found, options, compared=measure, json_file=json_file)
