"""`penstock backup`: what it copies opens again elsewhere, and a server that writes meanwhile does not disturb it."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
from pathlib import Path

import pytest

from penstock.identity import IdentityStore
from penstock.storage import open_database
from penstock.storage.backup import copy_database, sqlite_files
from tests.cli.command import penstock


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_STATE", str(tmp_path / "state"))
    return tmp_path / "state" / "penstock"


async def tenants(path: Path) -> list[str]:
    database = await open_database(f"sqlite:///{path}")
    try:
        store = IdentityStore(database)
        await store.prepare()
        return [tenant.id for tenant in await store.tenants()]
    finally:
        await database.close()


def test_everything_is_there_again(state: Path, tmp_path: Path) -> None:
    assert penstock("keys", "create", "--tenant", "acme").returncode == 0
    (state / "knowledge").mkdir()
    with sqlite3.connect(state / "knowledge" / "catalogue.db") as catalogue:
        catalogue.execute("CREATE TABLE chunks (text TEXT)")
        catalogue.execute("INSERT INTO chunks VALUES ('hello')")
    catalogue.close()
    copy = tmp_path / "copy"
    done = penstock("backup", str(copy))
    assert done.returncode == 0 and "3 files" in done.stdout, done
    assert stat.S_IMODE((copy / "penstock.db").stat().st_mode) == 0o600
    assert asyncio.run(tenants(copy / "penstock.db")) == ["acme"]
    assert (copy / ".penstock.db.has-keys").exists(), "a restored server still asks for keys"
    with sqlite3.connect(copy / "knowledge" / "catalogue.db") as restored:
        assert restored.execute("SELECT text FROM chunks").fetchall() == [("hello",)]
    restored.close()
    again = penstock("backup", str(copy))
    assert again.returncode == 2 and "not empty" in again.stderr


def test_what_is_not_here_is_named(state: Path, tmp_path: Path) -> None:
    nothing = penstock("backup", str(tmp_path / "copy"))
    assert nothing.returncode == 2 and "nothing to copy" in nothing.stderr
    url = "postgresql://ann:secret@db/penstock"
    told = penstock("backup", str(tmp_path / "copy"), "--set", f"store.url={url}")
    assert told.returncode == 0 and "pg_dump" in told.stdout and "secret" not in told.stdout


@pytest.mark.slow
def test_a_copy_is_one_moment_of_a_file_that_is_written(tmp_path: Path) -> None:
    source = tmp_path / "busy.db"
    writer = sqlite3.connect(source, isolation_level=None)
    writer.execute("PRAGMA journal_mode=WAL")
    writer.execute("CREATE TABLE pairs (a INTEGER, b INTEGER)")
    writer.executemany("INSERT INTO pairs VALUES (?, ?)", [(n, n) for n in range(20_000)])

    def write(done: int, total: int) -> None:
        writer.execute("UPDATE pairs SET a = a + 1, b = b + 1 WHERE a < 100")

    copy_database(source, tmp_path / "copy.db", write)
    writer.close()
    with sqlite3.connect(tmp_path / "copy.db") as copied:
        assert copied.execute("SELECT count(*), sum(a != b) FROM pairs").fetchone() == (20_000, 0)
    copied.close()
    (tmp_path / "notes.txt").write_text("no database")
    assert {path.name for path in sqlite_files(tmp_path)} == {"busy.db", "copy.db"}
