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
    fit: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Fit the factors to the rows again, write them to FILE and show those."),
    ] = None,
    json_file: Json = None,
) -> None:
    """
    Predicted step times beside what one H200 measured. Needs no GPU.

    Examples:

        penstock bench predictions

        penstock bench predictions --calibration mine.yaml --json rows.json

        penstock bench predictions --fit h200.yaml
    """
    from penstock.bench import predictions as predicted

    if fit is not None and calibration is not None:
        raise typer.BadParameter("--fit makes a calibration, --calibration uses one: give either")
    predicted.main(calibration, fit, json_file, console())
