"""`penstock bench retrieval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.bench.options import EncoderWeights, EncoderWeightsOption, console


def retrieval(
    library: Annotated[Path | None, typer.Option(help="Folder that keeps the collection for the next run.")] = None,
    weights: EncoderWeightsOption = EncoderWeights.auto,
) -> None:
    """
    How well collections are searched: recall of 20 candidates, and the rank of the answer after reranking.

    Takes some minutes on two cores, most of them for embedding.

    Examples:

        penstock bench retrieval

        penstock bench retrieval --library FOLDER --weights int8
    """
    from penstock.bench.knowledge import retrieval as measured

    if not measured.main(library, weights.value, console()):
        raise typer.Exit(1)
