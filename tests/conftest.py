"""What every test may use: the real default model, fetched once into the user's model cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engine.loading.sources import resolve


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The GGUF file of `smollm2-135m` (98 MB, downloaded on first use)."""
    return resolve("smollm2-135m")
