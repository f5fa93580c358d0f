"""What every test may use: the real default model, fetched once into the user's model cache, and real servers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.sources.resolve import resolve
from tests.encoders import encoder_endpoint, encoder_model
from tests.services import postgres_url, valkey

__all__ = ["encoder_endpoint", "encoder_model", "postgres_url", "valkey"]

LONG = (
    "tests/e2e/",
    "tests/fuzz/",
    "tests/deploy/test_alerts.py",
    "tests/engine/test_greedy_equals_reference.py",
    "tests/engine/test_default_model.py",
    "tests/supervisor/",
    "tests/gateway/workers/",
    "tests/engine/parallel/",
    "tests/engine/test_sliding_window.py",
    "tests/console/",
)
"""The longest first: a process takes whole files, and one that begins a long file last keeps the others waiting."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        return next((at for at, path in enumerate(LONG) if item.nodeid.startswith(path)), len(LONG))

    items.sort(key=place)


@pytest.fixture(scope="session", autouse=True)
def state() -> Iterator[None]:
    """Keys and accounts of the tests, never the user's own."""
    with tempfile.TemporaryDirectory(prefix="penstock-state-") as folder:
        os.environ["PENSTOCK_STATE"] = folder
        yield
        del os.environ["PENSTOCK_STATE"]


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The GGUF file of `smollm2-135m` (98 MB, downloaded on first use)."""
    return resolve("smollm2-135m")
