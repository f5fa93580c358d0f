"""A database file that is deleted, replaced or damaged while open is noticed, and not used."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from penstock.storage import DatabaseError, sqlite_health
from penstock.storage.sqlite import SQLiteDatabase
from penstock.storage.sqlite_health import DAMAGED, GONE, REPLACED

INSERT = "INSERT INTO notes VALUES (?, ?)"


@pytest.fixture
async def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SQLiteDatabase]:
    monkeypatch.setattr("penstock.storage.sqlite_health.FULL_CHECK_SHARE", 1e9)  # every change is looked at at once
    opened = await SQLiteDatabase.open(tmp_path / "test.db")
    await opened.execute("CREATE TABLE notes (id TEXT PRIMARY KEY, text TEXT)")
    await opened.transact([(INSERT, (str(number), "x" * 500)) for number in range(200)])
    await opened.fetch("PRAGMA wal_checkpoint(TRUNCATE)")
    await opened.check()
    yield opened
    await opened.close()


def replace(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").rename(path)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))


def overwrite_head(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"this is no database." * 5)


@pytest.mark.parametrize(("harm", "why"), [(Path.unlink, GONE), (replace, REPLACED)])
async def test_a_lost_file_is_noticed_by_the_next_transaction(
    database: SQLiteDatabase, harm: Callable[[Path], None], why: str
) -> None:
    harm(database.path)
    with pytest.raises(DatabaseError, match=why):
        await database.execute(INSERT, "new", "")
    assert database.problem == why
    with pytest.raises(DatabaseError, match=why):
        await database.fetch("SELECT 1")
    with pytest.raises(DatabaseError, match=why):
        await database.check()


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (Path.unlink, GONE),
        (replace, REPLACED),
        (overwrite, DAMAGED),
        (overwrite_head, DAMAGED),
        (lambda path: os.truncate(path, 0), DAMAGED),
        (lambda path: os.truncate(path, 8192), DAMAGED),
        (lambda path: path.with_name(f"{path.name}-wal").unlink(), GONE),
        (lambda path: path.with_name(f"{path.name}-shm").unlink(), GONE),
    ],
)
async def test_a_check_notices_whatever_happened_to_the_files(
    database: SQLiteDatabase, harm: Callable[[Path], None], why: str
) -> None:
    harm(database.path)
    with pytest.raises(DatabaseError, match=why):
        await database.check()
    assert database.problem == why
    with pytest.raises(DatabaseError, match=why):
        await database.execute(INSERT, "new", "")


async def test_a_file_that_goes_while_it_is_read_is_reported_as_gone(
    database: SQLiteDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite_health.connect_existing

    def late(path: Path, timeout_s: float) -> sqlite3.Connection:
        path.unlink()
        return connect(path, timeout_s)

    monkeypatch.setattr(sqlite_health, "connect_existing", late)
    with pytest.raises(DatabaseError, match=GONE):
        await database.check()
    assert database.problem == GONE


async def test_nothing_is_created_in_the_place_of_a_deleted_file(database: SQLiteDatabase) -> None:
    database.path.unlink()
    database._checkpoint()
    with pytest.raises(DatabaseError):
        await database.check()
    assert not database.path.exists()


async def test_a_file_that_was_put_back_is_used_again(database: SQLiteDatabase, tmp_path: Path) -> None:
    database.path.rename(tmp_path / "elsewhere")
    with pytest.raises(DatabaseError):
        await database.check()
    (tmp_path / "elsewhere").rename(database.path)
    await database.check()
    assert await database.execute(INSERT, "new", "") == 1


async def test_damage_that_a_statement_meets_is_remembered(database: SQLiteDatabase) -> None:
    overwrite(database.path)
    await database.fetch("PRAGMA shrink_memory")
    with pytest.raises(DatabaseError):
        await database.fetch("SELECT sum(length(text)) FROM notes")
    assert database.problem == DAMAGED
    with pytest.raises(DatabaseError, match=DAMAGED):
        await database.fetch("SELECT 1")


async def test_checks_keep_no_files_open_and_take_no_locks_away(database: SQLiteDatabase) -> None:
    other = await SQLiteDatabase.open(database.path)
    await database.check()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        await database.check()
        await other.execute(INSERT, f"other {number}", "")
        await database.execute(INSERT, f"one {number}", "")
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    await other.close()
    assert await database.fetch("SELECT count(*) FROM notes") == [(240,)]
    await database.check()
