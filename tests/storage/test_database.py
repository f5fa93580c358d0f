"""Both databases: transactions are atomic and durable, the event loop is never blocked, outages are reported."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.storage import Database, DatabaseError, open_database
from penstock.storage.database import merged, redacted
from penstock.storage.postgres import numbered
from penstock.storage.sqlite import SQLiteDatabase


@pytest.fixture(params=["sqlite", "postgres"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    url = f"sqlite:///{tmp_path / 'a' / 'test.db'}"
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_url")
    opened = await open_database(url)
    await opened.execute("DROP TABLE IF EXISTS notes")
    await opened.execute("CREATE TABLE notes (id TEXT PRIMARY KEY, text TEXT, size BIGINT)")
    yield opened
    await opened.close()


async def test_what_was_written_is_read_back(database: Database) -> None:
    assert await database.execute("INSERT INTO notes VALUES (?, ?, ?)", "a", "what?", 1 << 40) == 1
    assert await database.fetch("SELECT text, size FROM notes WHERE id = ? AND text <> '?'", "a") == [
        ("what?", 1 << 40)
    ]


async def test_statements_given_together_happen_together_or_not_at_all(database: Database) -> None:
    insert = "INSERT INTO notes (id) VALUES (?)"
    with pytest.raises(DatabaseError):
        await database.transact([(insert, ("a",)), (insert, ("b",)), (insert, ("a",))])
    assert await database.fetch("SELECT id FROM notes") == []
    assert await database.transact([(insert, ("a",)), ("UPDATE notes SET size = 1", ()), (insert, ("b",))]) == [1, 1, 1]


async def test_many_writers_lose_nothing(database: Database) -> None:
    await database.execute("INSERT INTO notes VALUES ('n', '', 0)")
    await asyncio.gather(*(database.execute("UPDATE notes SET size = size + 1 WHERE id = 'n'") for _ in range(200)))
    assert await database.fetch("SELECT size FROM notes") == [(200,)]


async def test_several_reads_see_one_state_whatever_others_write(tmp_path: Path) -> None:
    path = tmp_path / "test.db"
    database = await SQLiteDatabase.open(path)
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    await database.execute("CREATE TABLE notes (id TEXT PRIMARY KEY)")

    def twice(connection: sqlite3.Connection) -> list[int]:
        count = "SELECT COUNT(*) FROM notes"
        before = connection.execute(count).fetchone()[0]
        other.execute("INSERT INTO notes VALUES (?)", (str(before),))
        return [before, connection.execute(count).fetchone()[0]]

    assert await database.read(twice) == [0, 0] and await database.read(twice) == [1, 1]
    with pytest.raises(DatabaseError, match="no such table"):
        await database.read(lambda connection: connection.execute("SELECT * FROM nowhere"))
    assert await database.fetch("SELECT COUNT(*) FROM notes") == [(2,)], "and goes on"
    await database.close()
    other.close()


async def test_a_slow_statement_does_not_stop_the_loop(database: Database) -> None:
    slow = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) SELECT COUNT(*) FROM n"
    for size in (1_500_000, 6_000_000, 24_000_000):  # a busy machine may have had no turn for us meanwhile
        work = asyncio.create_task(database.fetch(slow, size))
        turns = 0
        while not work.done():
            await asyncio.sleep(0.005)
            turns += 1
        assert (await work) == [(size,)]
        if turns > 3:
            break
    assert turns > 3, "others have their turn meanwhile"


async def test_migrations_run_once_even_when_processes_start_together(database: Database) -> None:
    await database.execute("DROP TABLE IF EXISTS things")
    await database.create("CREATE TABLE IF NOT EXISTS schema_versions (component TEXT PRIMARY KEY, version INTEGER)")
    await database.execute("DELETE FROM schema_versions WHERE component = 'things'")
    first = ["CREATE TABLE IF NOT EXISTS things (id TEXT)"]
    await asyncio.gather(*(database.migrate("things", [first]) for _ in range(4)))
    await database.migrate("things", [first, ["INSERT INTO things VALUES ('x')"]])
    await database.migrate("things", [first, ["INSERT INTO things VALUES ('x')"]])
    assert await database.fetch("SELECT id FROM things") == [("x",)]


async def test_a_store_that_is_away_says_so(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match=r"postgresql://me:\*\*\*@127.0.0.1:1/x cannot be reached"):
        await open_database("postgresql://me:secret@127.0.0.1:1/x")
    (tmp_path / "file").write_text("")
    with pytest.raises(DatabaseError):
        await open_database(f"sqlite:///{tmp_path / 'file' / 'below.db'}")
    with pytest.raises(ConfigError, match="is not a database URL"):
        await open_database("mysql://x")


def test_passwords_are_not_shown_and_question_marks_in_text_are_text() -> None:
    assert redacted("postgresql://a:b@h/n") == "postgresql://a:***@h/n"
    assert numbered("SELECT '?' WHERE a = ? AND b = ?") == "SELECT '?' WHERE a = $1 AND b = $2"


async def test_what_does_not_wait_for_the_disk_survives_kill_9(database: Database, tmp_path: Path) -> None:
    insert = "INSERT INTO notes (id) VALUES (?)"
    assert await database.transact([(insert, ("a",))], durable=False) == [1]
    assert await database.transact([(insert, ("b",))]) == [1]
    assert await database.fetch("SELECT id FROM notes ORDER BY id") == [("a",), ("b",)]
    script = f"""
import asyncio, os, signal
from penstock.storage import open_database

async def main():
    database = await open_database("sqlite:///{tmp_path}/killed.db")
    await database.execute("CREATE TABLE notes (id INTEGER)")
    for number in range(5):
        await database.transact([("INSERT INTO notes VALUES (?)", (number,))], durable=False)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    assert await killed.wait() == -signal.SIGKILL
    again = await open_database(f"sqlite:///{tmp_path}/killed.db")
    assert await again.fetch("SELECT COUNT(*) FROM notes") == [(5,)]
    await again.close()


async def test_the_log_of_sqlite_is_folded_in_beside_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.storage.sqlite.LOG_BYTES", 256 * 1024)
    database = await open_database(f"sqlite:///{tmp_path}/folded.db")
    await database.execute("CREATE TABLE notes (text TEXT)")
    rows, log = 0, tmp_path / "folded.db-wal"
    while 8_000 * rows < log.stat().st_size + 4 * 2**20:  # a row is two pages; when nobody folds it in, it has them all
        assert rows < 10_000, "the log grows with every row"
        await database.transact([("INSERT INTO notes VALUES (?)", ("x" * 2000,))], durable=False)
        rows += 1
    assert await database.fetch("SELECT COUNT(*) FROM notes") == [(rows,)]
    await database.close()


async def test_the_disk_is_waited_for_beside_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes its time delays nobody who did not ask for it."""
    monkeypatch.setattr("penstock.storage.sqlite.FLUSH_S", 0.0)
    free, synced = threading.Event(), []

    def slow(file: int) -> None:
        free.wait(60)
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        os.fsync(file)

    database = await open_database(f"sqlite:///{tmp_path}/flushed.db")
    await database.execute("CREATE TABLE notes (text TEXT)")
    monkeypatch.setattr("penstock.storage.sqlite._sync", slow)
    for number in range(50):
        await database.transact([("INSERT INTO notes VALUES (?)", (str(number),))], durable=False)
    assert await database.fetch("SELECT COUNT(*) FROM notes") == [(50,)] and not synced
    flushed = asyncio.create_task(database.flush())
    await asyncio.sleep(0.05)
    assert not flushed.done()
    free.set()
    await flushed
    assert synced and set(synced) == {f"{tmp_path}/flushed.db-wal"}
    await database.close()


async def test_rows_of_one_table_are_written_together(database: Database) -> None:
    insert = "INSERT INTO notes (id, size) VALUES (?, ?) ON CONFLICT (id) DO NOTHING"
    update = "UPDATE notes SET size = size + 1 WHERE id = ?"
    statements = [(insert, ("a", 1)), (update, ("a",)), (insert, ("b", 2)), (insert, ("a", 9)), (update, ("b",))]
    together = merged(statements)
    assert [sql for sql, _ in together[1:]] == [update, update]
    await database.transact(together)
    assert await database.fetch("SELECT id, size FROM notes ORDER BY id") == [("a", 2), ("b", 3)]
    many = merged([(insert, (str(number), 0)) for number in range(40_000)])
    assert len(many) == 3, "no statement has more values than the stores take"
    assert sum(await database.transact(many, durable=False)) == 40_000
