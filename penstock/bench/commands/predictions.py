"""`penstock bench predictions`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.bench.options import Json, console


def predictions(
    device: Annotated[str, typer.Option(help="Whose rows: h200, cpu-2 or cpu-2-amx.")] = "h200",
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
    Predicted step times beside what was measured and recorded, on one H200 and on CPUs. Needs no GPU.

    Examples:

        penstock bench predictions

        penstock bench predictions --device cpu-2

        penstock bench predictions --calibration mine.yaml --json rows.json

        penstock bench predictions --fit h200.yaml
    """
    from penstock.bench import predictions as predicted

    if fit is not None and calibration is not None:
        raise typer.BadParameter("--fit makes a calibration, --calibration uses one: give either")
    predicted.main(device, calibration, fit, json_file, console())
