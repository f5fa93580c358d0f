"""Host memory: how much there is, and large pages for what a step reads from end to end.

A step reads every weight once. In pages of 4 KiB some of that time goes into address translation; with pages of 2 MiB
there are 512 times fewer. The system grants them on request for contiguous memory, so weights are cut out of slabs
instead of being allocated one by one. If it refuses, only speed is lost.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from penstock.machine import usable_memory

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


def is_host(device: torch.device) -> bool:
    """Whether a device computes in host memory."""
    return device.type == "cpu"


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeroed memory for a large cache. On the host its pages are taken on first touch, so that making it is free."""
    if not is_host(device):
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
    return in_large_pages(memory).view(dtype).view(shape)


class HostMemory:
    """See `DeviceMemory`. A cache takes a small share of it: the machine runs other things too."""

    share_of_free = 0.15
    share_of_rest = 1.0
    shared_by_ranks = True

    def available(self) -> int:
        return usable_memory().available

    def total(self) -> int:
        return usable_memory().total

    def used(self) -> int:
        try:
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return 0

    def peak(self, run: Callable[[], object]) -> int:
        return 0

    def trim(self, *, workspaces: bool = False) -> None:
        """Nothing is cached."""
