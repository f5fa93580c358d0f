"""Getting small host arrays to the device without waiting.

All arrays of a step go into one pinned buffer and cross in one copy. Buffers rotate: the engine never has more than
two steps in flight, each with a few uploads, so the host never writes into a buffer that the device may still read.
Who uploads more often waits for the copy out of a buffer before it is used again (`fenced`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.engine.backends.host_memory import is_host
from penstock.engine.backends.interface import CopyEvent, Staging

_ALIGN = 16
_DEPTH = 8
_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


def staging_for(device: torch.device, *, fenced: bool = False) -> Staging:
    """The staging that suits a device. `fenced`: for any number of uploads in a step."""
    return HostStaging() if is_host(device) else PinnedStaging(device, fenced=fenced)


class HostStaging:
    """See `Staging`: the tensors alias the arrays."""

    def upload(self, arrays: list[np.ndarray]) -> list[Tensor]:
        return [torch.from_numpy(array) for array in arrays]


class PinnedStaging:
    """See `Staging`: through pinned buffers that rotate."""

    def __init__(self, device: torch.device, *, fenced: bool = False) -> None:
        self._device = device
        self._pinned: list[Tensor | None] = [None] * _DEPTH
        self._copied: list[CopyEvent | None] = [None] * _DEPTH
        """The ends of the last copies, if they are waited for."""
        self._fenced = fenced
        self._turn = 0

    def upload(self, arrays: list[np.ndarray]) -> list[Tensor]:
        offsets: list[int] = []
        total = 0
        for array in arrays:
            offsets.append(total)
            total += -(-array.nbytes // _ALIGN) * _ALIGN
        pinned = self._buffer(total)
        view = pinned.numpy()
        for array, offset in zip(arrays, offsets, strict=True):
            view[offset : offset + array.nbytes] = array.view(np.uint8)
        device = pinned[:total].to(self._device, non_blocking=True)
        if self._fenced:
            self._copied[self._turn] = torch.cuda.current_stream(self._device).record_event()
        return [
            device[offset : offset + array.nbytes].view(_DTYPES[array.dtype])
            for array, offset in zip(arrays, offsets, strict=True)
        ]

    def _buffer(self, size: int) -> Tensor:
        self._turn = (self._turn + 1) % _DEPTH
        if (copied := self._copied[self._turn]) is not None:
            copied.synchronize()
        buffer = self._pinned[self._turn]
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(max(size, 1 << 16), dtype=torch.uint8, pin_memory=True)
            self._pinned[self._turn] = buffer
        return buffer
