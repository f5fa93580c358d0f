"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="Configuration file; by default ./penstock.yaml if it exists."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Set any key of `penstock config`; may be repeated."),
]
Entries = Annotated[int, typer.Option(min=1, help="Maximum number of entries; the newest are shown.")]
Records = Annotated[
    Literal["table", "json", "csv", "jsonl"],
    typer.Option("--output", "-o", help="table, json, csv, or jsonl: whole records, one per line."),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N, for every model.")]
TensorParallel = Annotated[int | None, typer.Option(help="Devices that split every layer, for every model.")]
Devices = Annotated[
    str | None, typer.Option(metavar="LIST", help="Device of each rank, like cuda:0,cuda:0; for every model.")
]
ExpertParallel = Annotated[
    bool | None, typer.Option(help="Place experts whole on the devices that split a layer, for every model.")
]
PipelineParallel = Annotated[int | None, typer.Option(help="Pipeline stages of consecutive layers, for every model.")]
Workers = Annotated[int | None, typer.Option(help="Gateway processes that share the port.")]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error.")]
Resolved = Annotated[Path | None, typer.Option(hidden=True, help="Resolved configuration from the supervisor.")]
Supervised = Annotated[int | None, typer.Option(hidden=True, help="File descriptor for status messages.")]

FleetUrl = Annotated[
    str | None,
    typer.Option("--fleet", metavar="URL", help="Registry of a fleet, redis://HOST:PORT, in place of fleet.url."),
]
