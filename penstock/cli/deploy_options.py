"""Options of every `penstock deploy` command, and how it writes its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Write into this folder; by default, print.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace files that are there with other contents.")]


def emit(files: Mapping[str, str], output: Path | None, force: bool) -> None:
    """Prints files (several as one stream, each under its name), or writes them and says so."""
    from penstock.fleet.files import write_files

    if output is not None:
        for path in write_files(files, output, force=force):
            typer.echo(f"wrote {path}", err=True)
    elif len(files) == 1:
        typer.echo(next(iter(files.values())), nl=False)
    else:
        for name, text in files.items():
            typer.echo(f"# {name}\n{text}", nl=not text.endswith("\n"))
