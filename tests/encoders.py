"""The real default encoder behind the real engine server, on a thread, for tests of what is built on it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.sources.resolve import resolve


@pytest.fixture(scope="session")
def encoder_model() -> Path:
    """The folder of `minilm` (91 MB, downloaded on first use)."""
    return resolve("minilm")


@pytest.fixture(scope="session")
def encoder_endpoint(encoder_model: Path) -> Iterator[str]:
    """Where the default encoder listens."""
    # Imported here: tests/conftest.py needs this module in every process, also where no test runs, and it needs torch.
    from penstock.engine.encoder.config import EncoderEngineConfig
    from penstock.engine.encoder.core import EncoderEngine
    from tests.engine_host.client import serving

    engine = EncoderEngine.load(EncoderEngineConfig(str(encoder_model), name="minilm", threads=1))
    with tempfile.TemporaryDirectory(prefix="ps-") as folder, serving(engine, f"ipc://{folder}/e") as running:
        yield running.endpoint
