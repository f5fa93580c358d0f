"""What native kernels read: dtypes by their numbers, dense tensors. Anything else is refused, never copied silently."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.backends.interface import FP8, INT8
from penstock.errors import PenstockError

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
CACHE_CODES = {**DTYPE_CODES, INT8: 3, FP8: 4}


class LayoutError(PenstockError):
    """A tensor handed to a native kernel has a dtype, shape or layout the kernel does not read."""


def dtype_code(tensor: Tensor, what: str) -> int:
    """The library's number for a tensor's dtype."""
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        raise LayoutError(f"{what} is {tensor.dtype}; the CPU kernels read float32, float16 and bfloat16")
    return code


def need_contiguous(tensor: Tensor, what: str) -> None:
    """Refuse anything but a dense row-major CPU tensor."""
    if not tensor.is_contiguous() or tensor.is_cuda:
        raise LayoutError(f"{what} must be a contiguous CPU tensor, got strides {tensor.stride()}")


def need(tensor: Tensor, what: str, dtype: torch.dtype) -> None:
    if tensor.dtype is not dtype:
        raise LayoutError(f"{what} must be {dtype}, got {tensor.dtype}")
    need_contiguous(tensor, what)
