"""Copies blocks between the device cache and the host's pool, many at once and without anybody waiting.

A block is scattered over the layers of the device cache; on the host it is one piece. So blocks going out are gathered
into a buffer on the device, in the order of the compute stream: after that the blocks may be overwritten. The buffer
then crosses to pinned memory on a stream of its own. Blocks coming back cross on another stream, into a buffer that the
compute stream scatters once they have arrived: the step waits on the device, the host never. Slots carry the events of
their last copies, so that the two directions keep out of each other's way. On CPU all of this is a plain copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from penstock.engine.kv.cache import KVCache
from penstock.engine.kv.host import Transfers
from penstock.errors import ConfigError

_BUFFER_BYTES = 64 << 20
"""Of one buffer on the device; more blocks than fit go in several."""


class BlockMover:
    """Owns the host's pool."""

    def __init__(self, kv: KVCache, num_slots: int) -> None:
        self.device = kv.device
        self._caches = [_words(tensor) for tensor in kv.tensors]
        self._pools = [_host_pool(num_slots, cache, self.device) for cache in self._caches]
        self._at_once = max(1, _BUFFER_BYTES // kv.shape.block_bytes)
        if self.device.type == "cuda":
            self._out, self._back = (torch.cuda.Stream(self.device) for _ in range(2))  # type: ignore[no-untyped-call]
            self._written: dict[int, torch.cuda.Event] = {}
            self._read: dict[int, torch.cuda.Event] = {}

    def memory(self, slot: int) -> list[memoryview]:
        """The bytes of a slot, one piece for each tensor of the cache."""
        return [pool[slot].view(torch.uint8).view(-1).numpy().data for pool in self._pools]

    def settled(self, slot: int) -> bool:
        """Whether every copy from or to the slot is over."""
        if self.device.type != "cuda":
            return True
        events = [marks[slot] for marks in (self._written, self._read) if slot in marks]
        return all(event.query() for event in events)  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def run(self, transfers: Transfers) -> None:
        """Make the copies, as far as anything launched afterwards on the current stream can tell."""
        out, back = list(transfers.out), [(slot, block) for block, slot in transfers.back.items()]
        if self.device.type == "cuda":
            for begin in range(0, len(out), self._at_once):
                self._send(out[begin : begin + self._at_once])
            for begin in range(0, len(back), self._at_once):
                self._fetch(back[begin : begin + self._at_once])
            return
        for cache, pool in zip(self._caches, self._pools, strict=True):
            for block, slot in out:
                pool[slot] = cache[:, block]
            for slot, block in back:
                cache[:, block] = pool[slot]

    def _send(self, pairs: list[tuple[int, int]]) -> None:
        """Device to host; the blocks may be overwritten by whatever the compute stream does next."""
        compute = torch.cuda.current_stream(self.device)
        blocks = self._index([block for block, _ in pairs])
        slots = [slot for _, slot in pairs]
        buffers = [cache.index_select(1, blocks).transpose(0, 1).contiguous() for cache in self._caches]
        self._out.wait_stream(compute)
        _wait(self._out, self._read, slots)
        with torch.cuda.stream(self._out):
            for buffer, pool in zip(buffers, self._pools, strict=True):
                for begin, end, slot in _runs(slots):
                    pool[slot : slot + end - begin].copy_(buffer[begin:end], non_blocking=True)
                buffer.record_stream(self._out)
        self._mark(self._written, self._out, slots)

    def _fetch(self, pairs: list[tuple[int, int]]) -> None:
        """Host to device; what the compute stream does next finds the blocks filled."""
        compute = torch.cuda.current_stream(self.device)
        slots = [slot for slot, _ in pairs]
        blocks = self._index([block for _, block in pairs])
        _wait(self._back, self._written, slots)
        with torch.cuda.stream(self._back):
            buffers = [torch.empty((len(slots), *pool.shape[1:]), dtype=pool.dtype, device=self.device)
                       for pool in self._pools]  # fmt: skip
            for buffer, pool in zip(buffers, self._pools, strict=True):
                for begin, end, slot in _runs(slots):
                    buffer[begin:end].copy_(pool[slot : slot + end - begin], non_blocking=True)
        self._mark(self._read, self._back, slots)
        compute.wait_stream(self._back)
        for cache, buffer in zip(self._caches, buffers, strict=True):
            cache.index_copy_(1, blocks, buffer.transpose(0, 1))
            buffer.record_stream(compute)

    def _index(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, pin_memory=True).to(self.device, non_blocking=True)

    def _mark(self, marks: dict[int, torch.cuda.Event], stream: torch.cuda.Stream, slots: list[int]) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        marks.update(dict.fromkeys(slots, event))


def _wait(stream: torch.cuda.Stream, marks: dict[int, torch.cuda.Event], slots: list[int]) -> None:
    """Let `stream` wait for the copies that last touched `slots`, and forget those."""
    events = [marks.pop(slot) for slot in slots if slot in marks]
    for event in {id(event): event for event in events}.values():
        stream.wait_event(event)


def _runs(slots: list[int]) -> Iterator[tuple[int, int, int]]:
    """Neighbouring slots cross in one copy: (first index, end index, first slot) of each run."""
    for _, run in groupby(enumerate(slots), key=lambda pair: pair[1] - pair[0]):
        members = list(run)
        yield members[0][0], members[-1][0] + 1, members[0][1]


def _words(tensor: Tensor) -> Tensor:
    """[layers * 2, num_blocks, words]: the same memory as the widest integers that fit."""
    raw = tensor.view(torch.uint8)
    raw = raw.view(-1, tensor.shape[2], raw[0, 0, 0].numel())
    for dtype in (torch.int64, torch.int32, torch.int16):
        if raw.shape[2] % dtype.itemsize == 0:
            return raw.view(dtype)
    return raw


def _host_pool(num_slots: int, cache: Tensor, device: torch.device) -> Tensor:
    """[num_slots, layers * 2, words]. Its pages are taken when first used on CPU, pinned now on CUDA."""
    shape = (num_slots, cache.shape[0], cache.shape[2])
    flat = np.zeros(num_slots * cache.shape[0] * cache.shape[2] * cache.element_size(), np.uint8)
    pool = torch.from_numpy(flat).view(cache.dtype).view(shape)
    if device.type == "cuda":
        # Registered rather than allocated pinned: torch's allocator would round it up to a power of two.
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        failed = int(runtime.cudaHostRegister(pool.data_ptr(), flat.nbytes, 0))
        if failed:
            raise ConfigError(f"host_memory: {flat.nbytes} bytes cannot be pinned (CUDA error {failed}); set it lower")
        weakref.finalize(pool, runtime.cudaHostUnregister, pool.data_ptr())
    return pool
