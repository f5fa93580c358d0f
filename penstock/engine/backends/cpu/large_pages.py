"""Host memory for what a step reads from end to end, in large pages where the system grants them.

A step reads every weight once. In pages of 4 KiB some of that time goes into finding the pages; in pages of 2 MiB there
are 512 times fewer. The system gives them on request for memory that lies together, so weights are cut out
of slabs instead of being allocated one by one. A refusal costs only speed.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Final

import torch
from torch import Tensor

_PAGE: Final = 2 << 20
_SLAB: Final = 32 << 20
_ALIGNMENT: Final = 64
_MADV_HUGEPAGE: Final = 14


@cache
def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def in_large_pages(memory: Tensor) -> Tensor:
    """Ask for large pages under host memory that nothing has touched yet; returns it."""
    size = memory.numel() * memory.element_size()
    begin = -(-memory.data_ptr() // _PAGE) * _PAGE
    end = (memory.data_ptr() + size) // _PAGE * _PAGE
    libc = _libc()
    if libc is not None and end > begin:
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)
    return memory


class Slabs:
    """Cuts host memory out of large pieces. A piece is freed with the last tensor cut out of it."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """`size` uninitialized bytes, aligned for vector loads."""
        whole = -(-size // _ALIGNMENT) * _ALIGNMENT
        if whole > self._left.numel():
            self._left = in_large_pages(torch.empty(max(whole, _SLAB), dtype=torch.uint8))
        taken, self._left = self._left[:size], self._left[whole:]
        return taken
