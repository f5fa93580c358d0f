"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="Configuration; ./penstock.yaml when it exists."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Any key of `penstock config`; may be repeated."),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N, for every model.")]
TensorParallel = Annotated[int | None, typer.Option(help="Devices that share every layer, for every model.")]
PipelineParallel = Annotated[int | None, typer.Option(help="Stages that share out the layers, for every model.")]
Workers = Annotated[int | None, typer.Option(help="Gateway processes that share the port.")]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error.")]
Resolved = Annotated[Path | None, typer.Option(hidden=True, help="Configuration prepared by the supervisor.")]
Supervised = Annotated[int | None, typer.Option(hidden=True, help="Descriptor for reports to the supervisor.")]
