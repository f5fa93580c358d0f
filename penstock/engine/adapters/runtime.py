"""The adapters of one engine: the pool that assigns slots, the kernel that holds them, the decoder with them."""

from __future__ import annotations

import numpy as np
import torch

from penstock.engine.adapters.apply import LoraKernel
from penstock.engine.adapters.layout import AdapterLayout
from penstock.engine.adapters.pool import AdapterPool
from penstock.engine.models.decoder import Decoder
from penstock.engine.scheduler import Batch


class AdapterRuntime:
    """What the runner needs: the adapted decoder, and a step's adapters in place."""

    def __init__(
        self,
        pool: AdapterPool,
        kernel: LoraKernel,
        decoder: Decoder,
        layout: AdapterLayout,
        dtype: torch.dtype,
        narrow: Decoder | None = None,
    ) -> None:
        """`dtype`: of the adapters' weights. `narrow`: a decoder for steps in which all adapters are narrow (see
        `LoadedAdapter`), which skips the linears that they do not touch."""
        self.dtype = dtype
        self.pool = pool
        self.kernel = kernel
        self.decoder = decoder
        self.narrow = narrow
        self.layout = layout

    def fill_slots(self) -> None:
        """Make the copies that the scheduled step relies on. They are queued before it on the same stream."""
        moves = self.pool.slots.moves
        while moves:
            self.kernel.put(*moves[0])
            del moves[0]  # only now: a copy that failed is made again

    def begin(self, batch: Batch) -> Decoder | None:
        """Prepare the kernel for a batch; the decoder that runs it, None when no sequence of it uses an adapter."""
        slots = slots_of(batch)
        if slots.max() < 0:
            return None
        self.kernel.begin(slots)
        return self.narrow if self.narrow is not None and is_narrow(batch) else self.decoder


def is_narrow(batch: Batch) -> bool:
    """Whether all adapters of a batch are; see `LoadedAdapter`."""
    adapters = (chunk.seq.adapter for chunk in batch.chunks)
    return all(adapter is None or adapter.narrow for adapter in adapters)


def slots_of(batch: Batch) -> np.ndarray:
    """The adapter slot of each packed token; -1 where there is none."""
    slots = np.array([chunk.seq.slot for chunk in batch.chunks], np.int32)
    return np.repeat(slots, [chunk.length for chunk in batch.chunks])
