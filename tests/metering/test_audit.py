"""The audit log: written in the background, bounded by age, number and memory, readable with filters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.metering.audit import FIELDS, AuditEntry, AuditLog, AuditStore
from penstock.storage import Database, DatabaseError, open_database
from penstock.telemetry.exposition import MetricRegistry
from tests.gateway.conftest import until


def entry(number: int, **fields: Any) -> AuditEntry:
    given = {"outcome": "refused", "kind": "model", "name": "far", **fields}
    return AuditEntry(id=f"{number:06}", timestamp=float(number), **given)


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    found = await open_database(f"sqlite:///{tmp_path / 'state.db'}")
    yield found
    await found.close()


async def test_entries_are_read_newest_first_and_by_filter(database: Database) -> None:
    store = AuditStore(database)
    await store.prepare()
    await store.write([entry(1, tenant="a"), entry(2, tenant="b", outcome="permitted"), entry(3, tenant="a")])
    await store.write([entry(3, tenant="a")])
    assert [one.timestamp for one in await store.read()] == [3.0, 2.0, 1.0], "a batch may be written twice"
    assert [one.timestamp for one in await store.read(tenant="a", since=2.0)] == [3.0]
    assert [one.timestamp for one in await store.read(outcome="permitted", until=3.0)] == [2.0]
    assert await store.read(name="near") == [] and len(await store.read(limit=1)) == 1
    assert not {"text", "prompt", "content", "messages"} & set(FIELDS), "never text"


async def test_old_entries_are_deleted_by_age_and_by_number(database: Database) -> None:
    store = AuditStore(database, retention_s=100.0, most=20, clock=lambda: 1000.0)
    await store.prepare()
    for first in range(800, 1000, 50):
        await store.write([entry(number) for number in range(first, first + 50)])
    await store.prune()
    assert [one.timestamp for one in await store.read(limit=1000)] == [float(n) for n in range(999, 979, -1)]


async def test_entries_wait_while_the_store_is_away_and_no_request_does(database: Database, monkeypatch: Any) -> None:
    store = AuditStore(database)
    await store.prepare()
    write, away = store.write, True

    async def flaky(entries: Any) -> None:
        if away:
            raise DatabaseError("away")
        await write(entries)

    monkeypatch.setattr(store, "write", flaky)
    monkeypatch.setattr("penstock.metering.audit.FLUSH_S", 0.01)
    monkeypatch.setattr("penstock.metering.audit.RETRY_S", 0.01)
    log = AuditLog(store, MetricRegistry(), capacity=100)
    log.start()
    for number in range(150):
        log.put(entry(number))
    await asyncio.sleep(0.05)
    assert await store.read() == []
    away = False
    await until(lambda: store.read(limit=1000), lambda found: len(found) == 100)
    log.put(entry(1000))
    await log.close()
    assert len(await store.read(limit=1000)) == 101, "50 did not fit; what is queued is written at the end"
