"""A client of ClickHouse for the request log: inserts that may be repeated, and migrations.

An insert has a token. ClickHouse remembers tokens per table, also for the tables behind materialised views: repeating
an insert changes nothing where it succeeded, and completes it where it broke off.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from penstock.errors import ConfigError, PenstockError, needs_extra
from penstock.metering.clickhouse.schema import (
    DEAD_LETTERS,
    MIGRATIONS,
    Retention,
    applied,
    migrations,
    migrations_table,
    set_retention,
    tables,
)
from penstock.metering.log_entries import Entry, LogEntry, Stream

log = logging.getLogger(__name__)

SCHEMES = ("clickhouse", "clickhouses", "chdb")
MOST_QUERY_BYTES = 64 * 2**20
"""A query that looks up a whole batch of ids is longer than the server's default limit."""
MARGIN_S = 60.0
"""How far apart the times of two entries may be that are told apart by their id alone."""
MARKS = {"\\": "\\\\", "'": "\\'"}


class ClickHouseError(PenstockError):
    """ClickHouse did not do what was asked; it may later."""


def check_url(url: str, key: str) -> None:
    """ConfigError for something that is no address of ClickHouse."""
    if urlsplit(url).scheme not in SCHEMES:
        raise ConfigError(
            f"{key}: the address of ClickHouse is needed: clickhouse://USER:PASSWORD@HOST:8123/DATABASE, "
            "clickhouses:// over TLS, or chdb:///FOLDER for the embedded engine"
        )


class ClickHouse:
    """Connects on first use, and again after a failure. Its calls block."""

    def __init__(self, url: str, *, timeout_s: float, key: str = "request_log.url") -> None:
        check_url(url, key)
        parts = urlsplit(url)
        self._embedded = parts.scheme == "chdb"
        self._module = _driver("clickhouse_connect", "clickhouse", key)
        if self._embedded:
            _driver("chdb", "chdb", key)
            self._options: dict[str, Any] = {"interface": "chdb", "path": unquote(parts.path) or ":memory:"}
        else:
            self._options = {
                "host": parts.hostname or "localhost",
                "port": parts.port,
                "username": None if parts.username is None else unquote(parts.username),
                "password": unquote(parts.password or ""),
                "database": parts.path.strip("/") or "default",
                "secure": parts.scheme == "clickhouses",
                "connect_timeout": timeout_s,
                "send_receive_timeout": timeout_s,
                **dict(parse_qsl(parts.query)),
            }
        self._client: Any = None

    def migrate(self, retention: Retention, report: Callable[[str], None] = log.info) -> list[int]:
        """Brings the tables to the newest version; returns the versions that were applied. May run at several places
        at one time."""
        self._command(migrations_table())
        done = {row[0] for row in self.query(f"SELECT version FROM {MIGRATIONS}")}
        newest = max((migration.version for migration in migrations()), default=0)
        if done and max(done) > newest:
            raise ClickHouseError(
                f"the tables have version {max(done)}, this Penstock knows {newest}: upgrade Penstock here first"
            )
        fresh = []
        for migration in migrations():
            if migration.version not in done:
                for statement in migration.statements:
                    self._command(statement)
                self._command(applied(migration))
                fresh.append(migration.version)
                report(f"applied migration {migration.version}: {migration.about}")
        self._set_retention(retention, report)
        return fresh

    def _set_retention(self, retention: Retention, report: Callable[[str], None]) -> None:
        """Only where it differs, because a change makes ClickHouse rewrite files."""
        for table in tables():
            [(made,)] = self.query(
                f"SELECT create_table_query FROM system.tables WHERE database = currentDatabase() AND name = '{table}'"
            )
            ttl = retention.of(table)
            if ttl and f" TTL {ttl} " not in f"{made} ":
                self._command(set_retention(table, ttl))
                report(f"{table}: keeps rows until {ttl}")
            elif not ttl and " TTL " in made:
                self._command(f"ALTER TABLE {table} REMOVE TTL")
                report(f"{table}: keeps rows for ever")

    def insert(self, stream: Stream, entries: Sequence[Entry], token: str) -> None:
        """Inserts entries into the table of the stream, and thereby into every view of it."""
        rows = [_row(entry) for entry in entries]
        self._insert(stream.table, rows, stream.fields, token)

    def insert_dead_letters(self, letters: Sequence[tuple[str, int, int, str, str]], token: str) -> None:
        """Inserts (topic, partition, offset, reason, value)."""
        now = round(time.time() * 1e3)
        rows = [[now, *letter] for letter in letters]
        self._insert(DEAD_LETTERS, rows, ("time", "topic", "partition", "offset", "reason", "value"), token)

    def known(self, stream: Stream, entries: Sequence[Entry]) -> set[tuple[str | int, ...]]:
        """The identities of those entries that the table has."""
        if not entries:
            return set()
        times = [entry.timestamp for entry in entries]
        ids = ", ".join(_quoted(getattr(entry, stream.key)) for entry in entries)
        columns = ", ".join(
            "toUnixTimestamp64Micro(timestamp)" if name == "timestamp" else name for name in stream.identity
        )
        margin_s = 0.0 if "timestamp" in stream.identity else MARGIN_S
        since, until = micros(min(times) - margin_s), micros(max(times) + margin_s)
        rows = self.query(
            f"SELECT {columns} FROM {stream.table} WHERE timestamp BETWEEN fromUnixTimestamp64Micro({max(since, 0)}) "
            f"AND fromUnixTimestamp64Micro({until}) AND {stream.key} IN ({ids})",
            settings={"max_query_size": MOST_QUERY_BYTES},
        )
        return set(rows)

    def query(self, sql: str, settings: dict[str, Any] | None = None) -> list[tuple[Any, ...]]:
        rows = self._do(lambda client: client.query(sql, settings=settings).result_rows)
        return [tuple(row) for row in rows]

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _insert(self, table: str, rows: list[list[Any]], columns: Sequence[str], token: str) -> None:
        settings = {
            "insert_deduplication_token": token,
            "deduplicate_blocks_in_dependent_materialized_views": 1,
            "async_insert": 0,
        }
        self._do(lambda client: client.insert(table, rows, column_names=list(columns), settings=settings))

    def _command(self, sql: str) -> None:
        self._do(lambda client: client.command(sql))

    def _do(self, work: Callable[[Any], Any]) -> Any:
        try:
            if self._client is None:
                self._client = self._module.get_client(**self._options)
            return work(self._client)
        except (self._module.driver.exceptions.Error, OSError) as error:
            if not self._embedded:
                self._drop()
            said = " ".join(str(error).split()).rpartition("Caused by ")[2]  # of an address that is away: why
            raise ClickHouseError(f"ClickHouse: {said[:500]}") from error

    def _drop(self) -> None:
        """Forgets the connection: after a failure it may be half dead."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


def identity(stream: Stream, entry: Entry) -> tuple[str | int, ...]:
    """As `known` returns it."""
    return tuple(micros(entry.timestamp) if name == "timestamp" else getattr(entry, name) for name in stream.identity)


def micros(seconds: float) -> int:
    return round(seconds * 1e6)


def _row(entry: Entry) -> list[Any]:
    values = [getattr(entry, name) for name in entry.__struct_fields__]
    # The driver accepts integer microseconds as they are; it would truncate a float to seconds.
    values[entry.__struct_fields__.index("timestamp")] = micros(entry.timestamp)
    if isinstance(entry, LogEntry):
        values[2] = entry.tenant or ""
    return values


def _quoted(text: str) -> str:
    return f"'{''.join(MARKS.get(letter, letter) for letter in text)}'"


def _driver(module: str, extra: str, key: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{key} {needs_extra(extra)}") from error
