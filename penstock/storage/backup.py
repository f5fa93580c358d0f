"""Copies SQLite files while servers use them: each copy is one consistent moment of its file and its log."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from penstock.storage.database import DatabaseError

PAGES = 4096
"""Pages copied at a time; between two such steps writers go on."""
MAGIC = b"SQLite format 3\x00"


def sqlite_files(folder: Path) -> Iterator[Path]:
    """Every database under `folder`, without the logs beside them."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.endswith(("-wal", "-shm")) and _is_database(path):
            yield path


def copy_database(source: Path, to: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Copies `source` to the new file `to`, readable by its owner only; what is incomplete has another name."""
    to.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    unfinished = to.with_name(f".{to.name}.unfinished")
    os.close(os.open(unfinished, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))

    def report(status: int, remaining: int, total: int) -> None:
        if progress is not None:
            progress(total - remaining, total)

    try:
        with (
            closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as reading,
            closing(sqlite3.connect(unfinished)) as writing,
        ):
            reading.backup(writing, pages=PAGES, progress=report)
            (found,) = writing.execute("PRAGMA quick_check").fetchone()
            if found != "ok":
                raise DatabaseError(f"{source}: the copy is damaged: {found}")
    except sqlite3.Error as error:
        raise DatabaseError(f"{source}: {error}") from error
    with unfinished.open("rb") as written:
        os.fsync(written.fileno())
    os.replace(unfinished, to)


def _is_database(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
