"""`Ops` in Triton, for CUDA devices.

Importing this package never imports triton: `load` does, when a CUDA device asks for it, so that the CPU engine
and the tests of everything else run where triton is not installed.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from penstock.engine.backends.cuda.ops import TritonOps


def load(device: torch.device) -> TritonOps | None:
    """The Triton backend for `device`, or None where it cannot run (no CUDA device, or no triton)."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from penstock.engine.backends.cuda.ops import TritonOps

    return TritonOps(device)
