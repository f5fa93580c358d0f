"""The adapters of one engine: the pool that assigns slots, the kernel that holds them, the decoder with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from penstock.engine.adapters.apply import FusedLora, LoraKernel, adapt
from penstock.engine.adapters.layout import AdapterLayout, layout_of
from penstock.engine.adapters.peft import LoadedAdapter, read_adapter
from penstock.engine.adapters.pool import AdapterPool
from penstock.engine.adapters.spec import DEFAULT_SLOTS, name_problem
from penstock.engine.backends.interface import Backend
from penstock.engine.config import EngineConfig
from penstock.engine.models.decoder import Decoder
from penstock.engine.scheduler import Batch
from penstock.errors import ConfigError


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


def slot_count(config: EngineConfig) -> int:
    """Device slots the configuration asks for; 0 turns adapters off."""
    if config.adapter_slots is not None:
        return config.adapter_slots
    return DEFAULT_SLOTS if config.adapters else 0


def make_adapters(
    config: EngineConfig, backend: Backend, decoder: Decoder, find: Callable[[str], Path], *, dtype: torch.dtype
) -> AdapterRuntime | None:
    """The adapters of an engine, or None when it has none. Device memory for the slots is taken here.
    `find` gives the local folder of an adapter's source."""
    slots = slot_count(config)
    if not slots:
        if config.adapters:
            raise ConfigError("adapters are listed, but adapter_slots is 0; raise it or remove them")
        return None
    _check(config, slots)
    layout = layout_of(decoder.config, by_output=backend.adapters_by_output)
    dtype, pin = backend.adapter_dtype(decoder, layout, dtype), not backend.in_host_memory

    def read(name: str, source: str) -> LoadedAdapter:
        return read_adapter(name, find(source), layout, max_rank=config.adapter_rank, dtype=dtype, pin=pin)

    pool = AdapterPool(config.adapters, read, slots=slots, host_slots=config.adapter_host_slots)
    kernel = backend.lora_kernel(layout, slots, config.adapter_rank, dtype)
    narrow = adapt(decoder, kernel, layout, sites=1) if isinstance(kernel, FusedLora) else None
    return AdapterRuntime(pool, kernel, adapt(decoder, kernel, layout), layout, dtype, narrow)


def _check(config: EngineConfig, slots: int) -> None:
    if config.adapter_host_slots < slots:
        raise ConfigError(f"adapter_host_slots ({config.adapter_host_slots}) must be at least adapter_slots ({slots})")
    pinned = sum(spec.pinned for spec in config.adapters)
    if pinned >= slots:
        raise ConfigError(f"{pinned} adapters are pinned; with adapter_slots {slots} at most {slots - 1} can be")
    names = [spec.name for spec in config.adapters]
    for spec in config.adapters:
        problem = name_problem(spec.name)
        if problem is not None:
            raise ConfigError(f"adapter {spec.name!r}: {problem}")
        if names.count(spec.name) > 1:
            raise ConfigError(f"two adapters are called {spec.name!r}")
        if not spec.source:
            raise ConfigError(f"adapter {spec.name!r} has no source")
