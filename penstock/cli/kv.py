"""`penstock kv`: erase what a tenant has left in KV caches, of a running server or in files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import urlencode

import typer

from penstock.cli.admin import DEFAULT_URL, Key, Url, call

app = typer.Typer(
    name="kv",
    help="Erase cached prefixes of a tenant.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


@app.callback()
def kv() -> None:
    """Erase cached prefixes of a tenant."""


@app.command()
def erase(
    tenant: Annotated[
        str, typer.Option(help="Whose. Empty: callers without a key, and everybody where prefixes are shared.")
    ],
    model: Annotated[str | None, typer.Option(help="Only on the engines of this model.")] = None,
    files: Annotated[
        Path | None, typer.Option(help="A `disk_path` whose files no engine uses: erase there, without a server.")
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Erase what a tenant's conversations have left in device memory, host memory and on disk.

    Examples:

        penstock kv erase --tenant acme

        penstock kv erase --tenant acme --files /var/cache/penstock
    """
    if files is not None:
        if model is not None:
            raise typer.BadParameter("files are erased for all models", param_hint="--model")
        _erase_files(files, tenant)
        return
    query = {"tenant": tenant} | ({} if model is None else {"model": model})
    found = call("DELETE", url, key, f"/kv?{urlencode(query)}")
    for entry in found["data"]:
        said = f"{entry['blocks']} blocks erased"
        if entry["failed"]:
            said += f"; {entry['failed']} could not be overwritten on disk"
        said = f"not erased: {entry['error']}" if "error" in entry else said
        typer.echo(f"{entry['model']} {entry['replica']}: {said}".replace(" :", ":"))
    if not found["complete"]:
        typer.echo("Not everything was erased: try again when all engines are up.", err=True)
        raise typer.Exit(1)


def _erase_files(disk_path: Path, tenant: str) -> None:
    from penstock.engine.kv.kept_folder import erase as erase_kept
    from penstock.errors import PenstockError
    from penstock.identity.entities import DEFAULT_TENANT

    owners = [tenant, ""] if tenant == DEFAULT_TENANT else [tenant]  # callers without a key are charged to it
    try:
        found = erase_kept(disk_path.expanduser(), *owners)
    except OSError as error:
        raise PenstockError(f"{disk_path}: {error.strerror or error}") from error
    typer.echo(f"{found.blocks} blocks erased")
    for slot in found.busy:
        typer.echo(f"{slot} is used by an engine: erase there through its server", err=True)
    if found.busy:
        raise typer.Exit(1)
