"""Copies of KV blocks to and from the host beside the steps: neither the host nor unrelated kernels wait for them.

Blocks going out are gathered into a buffer on the device, in the order of the compute stream: after that the blocks may
be overwritten. The buffer then crosses to pinned memory on a stream of its own. Blocks coming back cross on another
stream, into a buffer that the compute stream scatters once they have arrived: the step waits on the device, the host
never. Slots carry the events of their last copies, so that the two directions keep out of each other's way.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from penstock.engine.kv.cache import KVCache
from penstock.engine.kv.host import Transfers
from penstock.engine.kv.mover import PoolMover, populate
from penstock.errors import ConfigError

_BUFFER_BYTES = 64 << 20
"""Of one buffer on the device; more blocks than fit go in several."""


class CudaBlockMover(PoolMover):
    """See `BlockMover`."""

    def __init__(self, kv: KVCache, num_slots: int) -> None:
        super().__init__(kv, num_slots)
        self._device = kv.device
        self._at_once = max(1, _BUFFER_BYTES // max(1, kv.shape.block_bytes))
        self._out, self._back = (torch.cuda.Stream(self._device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._written: dict[int, torch.cuda.Event] = {}
        self._read: dict[int, torch.cuda.Event] = {}
        for pool in self._pools:
            populate(pool)
            _pin(pool)

    def is_idle(self, slot: int) -> bool:
        events = [marks.get(slot) for marks in (self._written, self._read)]
        return all(event is None or event.query() for event in events)  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def run(self, transfers: Transfers) -> None:
        # In the order of slots, in which neighbours cross together: a sequence leaves with its end first and comes back
        # with its beginning first, which would be a copy for every block.
        out = sorted(transfers.out, key=lambda pair: pair[1])
        back = sorted((slot, block) for block, slot in transfers.back.items())
        for begin in range(0, len(out), self._at_once):
            self._send(out[begin : begin + self._at_once])
        for begin in range(0, len(back), self._at_once):
            self._fetch(back[begin : begin + self._at_once])

    def _send(self, pairs: list[tuple[int, int]]) -> None:
        """Device to host; the blocks may be overwritten by whatever the compute stream does next."""
        compute = torch.cuda.current_stream(self._device)
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
        compute = torch.cuda.current_stream(self._device)
        slots = [slot for slot, _ in pairs]
        blocks = self._index([block for _, block in pairs])
        _wait(self._back, self._written, slots)
        with torch.cuda.stream(self._back):
            buffers = [torch.empty((len(slots), *pool.shape[1:]), dtype=pool.dtype, device=self._device)
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
        return torch.tensor(numbers, pin_memory=True).to(self._device, non_blocking=True)

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


def _pin(pool: Tensor) -> None:
    """Registered rather than allocated pinned: torch's allocator would round it up to a power of two."""
    size = pool.numel() * pool.element_size()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    failed = int(runtime.cudaHostRegister(pool.data_ptr(), size, 0))
    if failed:
        raise ConfigError(f"host_memory: {size / 2**30:.2f} GiB cannot be pinned (CUDA error {failed}); set it lower")
    weakref.finalize(pool, runtime.cudaHostUnregister, pool.data_ptr())
