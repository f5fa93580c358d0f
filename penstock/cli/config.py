"""`penstock config`: the reference of all settings, an example file, and a check of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def config(
    check: Annotated[Path | None, typer.Option(metavar="FILE", help="Check a file and exit.")] = None,
    example: Annotated[bool, typer.Option("--example", help="Print an example file with every key.")] = False,
) -> None:
    """
    Show every setting with its default, check a file, or print an example file.

    --check also looks for the folders and files that a file names; what would be downloaded is not looked up.

    Flags override environment variables (PENSTOCK_SERVER__PORT=9000; PENSTOCK_STORE__URL__FILE=FILE for a value from a
    file), which override penstock.yaml.

    Examples:

        penstock config

        penstock config --example > penstock.yaml

        penstock config --check penstock.yaml
    """
    from penstock.config import load
    from penstock.config.describe import example as example_file

    if example:
        typer.echo(example_file(), nl=False)
    elif check is not None:
        from penstock.errors import ConfigError
        from penstock.supervisor.diagnostics import missing_sources

        checked = load(check)
        missing = missing_sources(checked)
        if missing:
            raise ConfigError("\n".join(missing))
        names = ", ".join(model.name for model in checked.models)
        typer.echo(f"{check}: ok ({names} on {checked.server.host}:{checked.server.port})")
    else:
        _reference()


def _reference() -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from penstock.config.describe import keys

    console = Console(highlight=False)
    section = ""
    for key in keys():
        if key.section != section:
            section = key.section
            console.print(Text(f"\n{section}", style="bold cyan"))
        console.print(Text.assemble("  ", (key.path, "bold"), f" = {key.default}"))
        detail = Table.grid(padding=(0, 1))
        detail.add_row("   ", Text(key.doc))
        detail.add_row("   ", Text(f"{key.accepts}; {key.variable}", style="dim"))
        console.print(detail)
