"""`penstock bench predictions`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.bench.options import Json, console


def predictions(
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of `bench engine --calibrate`; the packaged one by default.")
    ] = None,
    json_file: Json = None,
) -> None:
    """
    Predicted step times beside what one H200 measured. Needs no GPU.

    Examples:

        penstock bench predictions

        penstock bench predictions --calibration mine.yaml --json rows.json
    """
    from penstock.bench import predictions as predicted

    predicted.main(calibration, json_file, console())
