"""`penstock backup`: a copy of everything that a server keeps, made while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import ConfigFile, Settings

if TYPE_CHECKING:
    from penstock.config import Config

SQLITE = "sqlite:///"


def backup(
    to: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder for the copies.", file_okay=False)],
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """
    Copy keys, tenants, ledger, conversations, files, batches and collections into a folder, while the server runs.

    SQLite files are copied here. Databases in PostgreSQL are named, with the command that copies them. Models are not
    copied: they can be fetched again.

    Examples:

        penstock backup ./backup-2026-11-16

        penstock backup /mnt/nightly -c penstock.yaml
    """
    from penstock.cli.terminal import download_bar, flags, stderr
    from penstock.config import load
    from penstock.errors import PenstockError
    from penstock.storage.backup import copy_database
    from penstock.storage.database import redacted

    config = load(config_file, flags=flags(settings))
    if to.exists() and any(to.iterdir()):
        raise PenstockError(f"{to} is not empty; name a new folder")
    found = list(_files(config))
    elsewhere = sorted({url for url in _urls(config) if url.startswith(("postgresql:", "postgres:"))})
    if not found and not elsewhere:
        raise PenstockError("there is nothing to copy yet: no server has stored anything")
    for name, path in found:
        with download_bar(stderr(), name) as progress:
            if path.name.startswith("."):
                (to / name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                (to / name).write_bytes(path.read_bytes())
            else:
                copy_database(path, to / name, lambda done, total: progress("copying", done, total))
    if found:
        typer.echo(f"{to}: {len(found)} files, {sum((to / name).stat().st_size for name, _ in found):,} bytes")
    for url in elsewhere:
        typer.echo(
            f"Not copied: {redacted(url)}; copy it with: pg_dump --format=custom --file={to}/postgresql.dump URL"
        )


def _urls(config: Config) -> list[str]:
    from penstock.gateway.rag.library import library_url
    from penstock.storage.database import default_url

    log = config.request_log.url
    kept = (config.store.url or default_url(), library_url(config.knowledge, config.store.url), log)
    return [url for url in kept if url]


def _files(config: Config) -> Iterator[tuple[str, Path]]:
    """Name inside the backup, and path, of every file: databases, and the markers beside them."""
    from penstock.storage.backup import sqlite_files

    seen = set()
    for url in _urls(config):
        path = Path(url.removeprefix(SQLITE))
        if not url.startswith(SQLITE) or path in seen or not path.exists():
            continue
        seen.add(path)
        if path.is_dir():
            yield from ((f"{path.name}/{file.relative_to(path)}", file) for file in sqlite_files(path))
        else:
            yield path.name, path
            yield from ((marker.name, marker) for marker in path.parent.glob(f".{path.name}.has-keys"))
