"""Every test draws the same numbers, whatever has run before it in the same process."""

from __future__ import annotations

import numpy as np
import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    torch.default_generator.manual_seed(0)  # torch.manual_seed looks for devices of all kinds, which takes longer
    np.random.seed(0)
