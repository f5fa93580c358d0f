"""Reading the length of SQLite's log does not release SQLite's locks, which other processes rely on."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

from penstock.storage.sqlite import CHECK_EVERY, SQLiteDatabase
from penstock.storage.wal_index import WalIndex

IN_USE = 128
"""The byte of the index that every process which uses it has a shared lock on."""
TRY = f"""
import fcntl, sys
with open(sys.argv[1], "rb+") as index:
    try:
        fcntl.lockf(index, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, {IN_USE})
    except OSError:
        print("in use")
"""


def seen_by_another_process(path: Path) -> str:
    done = subprocess.run([sys.executable, "-c", TRY, f"{path}-shm"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


async def busy(path: Path) -> SQLiteDatabase:
    database = await SQLiteDatabase.open(path)
    await database.execute("CREATE TABLE IF NOT EXISTS notes (text TEXT)")
    for number in range(2 * CHECK_EVERY):
        await database.execute("INSERT INTO notes VALUES (?)", f"note {number}")
    return database


async def test_a_database_that_was_looked_at_is_still_in_use(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    database = await busy(path)
    assert seen_by_another_process(path) == "in use"
    second = await busy(path)
    await second.close()
    assert seen_by_another_process(path) == "in use", "one of two connections was closed"
    await database.close()


async def test_pages_are_those_of_the_log_and_nothing_stays_open(tmp_path: Path) -> None:
    path = tmp_path / "b.db"
    before = open_files()
    index = WalIndex.hold(path)
    assert index.pages() == 0, "there is no log yet"
    database = await busy(path)
    connection = sqlite3.connect(path)
    _, pages, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    connection.close()
    assert index.pages() == pages > 0
    await database.close()
    index.release()
    assert open_files() <= before
