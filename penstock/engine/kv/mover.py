"""Copies blocks between the device cache and the host's pool, many at once.

A block is scattered over the layers of the device cache; on the host it is one piece, a slot of a pool. The backend
supplies the mover: in host memory it is a plain copy, elsewhere copies run beside the steps.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from penstock.engine.kv.cache import KVCache
from penstock.engine.kv.host import Transfers
from penstock.machine import usable_cores

_POLL_S = 0.0005
_PIECE = 64 << 20
_POPULATING = 16
"""Most threads that take pages."""
_POPULATE_WRITE = 23
"""Advice to Linux since 5.14: give these pages memory now."""


class BlockMover(ABC):
    """Copies to and from slots of host memory."""

    @abstractmethod
    def memory(self, slot: int) -> list[memoryview]:
        """The bytes of a slot, one piece for each tensor of the cache."""

    @abstractmethod
    def is_idle(self, slot: int) -> bool:
        """Whether every copy from or to the slot is over. May be asked by any thread."""

    @abstractmethod
    def run(self, transfers: Transfers) -> None:
        """Make the copies, as far as anything launched afterwards on the current stream can tell."""

    def wait(self, slots: Iterable[int]) -> None:
        """Until every copy from or to these slots is over. For threads that do not step the engine."""
        for slot in slots:
            while not self.is_idle(slot):
                time.sleep(_POLL_S)


class PoolMover(BlockMover):
    """Owns the host's pool, of blocks as this process's cache has them."""

    def __init__(self, kv: KVCache, num_slots: int) -> None:
        self._caches = [_words(tensor) for tensor in kv.tensors]
        self._pools = [_host_pool(num_slots, cache) for cache in self._caches]

    def memory(self, slot: int) -> list[memoryview]:
        return [pool[slot].view(torch.uint8).view(-1).numpy().data for pool in self._pools]


class HostBlockMover(PoolMover):
    """For a cache in host memory."""

    def is_idle(self, slot: int) -> bool:
        return True

    @torch.inference_mode()
    def run(self, transfers: Transfers) -> None:
        for cache, pool in zip(self._caches, self._pools, strict=True):
            for block, slot in transfers.out:
                pool[slot] = cache[:, block]
            for block, slot in transfers.back.items():
                cache[:, block] = pool[slot]


def populate(pool: Tensor) -> int:
    """Take the pages of a pool now, on all processors: pinning takes them too, but one after the other. Returns how
    many bytes were taken; fewer than all where the system cannot, and then nothing is lost but time."""
    size, address = pool.numel() * pool.element_size(), pool.data_ptr()
    first, end = -(-address // _PIECE) * _PIECE, (address + size) // _PIECE * _PIECE
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return 0
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    pieces = range(first, end, _PIECE)
    if not pieces:
        return 0
    with ThreadPoolExecutor(min(len(pieces), usable_cores(), _POPULATING)) as threads:
        failed = threads.map(lambda piece: bool(madvise(piece, _PIECE, _POPULATE_WRITE)), pieces)
        return _PIECE * (len(pieces) - sum(failed))


def _words(tensor: Tensor) -> Tensor:
    """[layers * 2, num_blocks, words]: the same memory as the widest integers that fit."""
    raw = tensor.view(torch.uint8)
    raw = raw.view(-1, tensor.shape[2], raw[0, 0, 0].numel())
    for dtype in (torch.int64, torch.int32, torch.int16):
        if raw.shape[2] % dtype.itemsize == 0:
            return raw.view(dtype)
    return raw


def _host_pool(num_slots: int, cache: Tensor) -> Tensor:
    """[num_slots, layers * 2, words]. Its pages are taken when first used."""
    shape = (num_slots, cache.shape[0], cache.shape[2])
    flat = np.zeros(num_slots * cache.shape[0] * cache.shape[2] * cache.element_size(), np.uint8)
    return torch.from_numpy(flat).view(cache.dtype).view(shape)
