"""Kernel tests need triton and either a CUDA device or Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
if importlib.util.find_spec("triton") is None or not (
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
):
    collect_ignore_glob = ["test_triton_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
