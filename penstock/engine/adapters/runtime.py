"""The adapters of one engine: the pool that assigns slots, the kernel that holds them, the decoder with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from penstock.engine.adapters.adaption_prompts import with_adaption_prompts
from penstock.engine.adapters.apply import LoraKernel
from penstock.engine.adapters.ends import BoundedHead
from penstock.engine.adapters.head_norms import with_head_norms
from penstock.engine.adapters.layout import AdapterLayout
from penstock.engine.adapters.norms import with_norms
from penstock.engine.adapters.peft import LoadedAdapter
from penstock.engine.adapters.pool import AdapterPool
from penstock.engine.adapters.prefixes import with_prefixes
from penstock.engine.batch import Batch
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.layers.linear import Linear
from penstock.errors import PenstockError, ReplicaLost


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """A decoder with slots for adapters: what every rank of an engine has of them."""

    kernel: LoraKernel
    decoder: Decoder
    layout: AdapterLayout
    dtype: torch.dtype
    """Of the adapters' weights."""
    read: Callable[[str, Path], LoadedAdapter]
    """(name, folder) to this process's part of an adapter; see `read_adapter`."""
    narrow: Decoder | None = None
    """A decoder for steps in which all adapters are narrow (see `LoadedAdapter`), which skips the linears that they do
    not touch."""
    further: Decoder | None = None
    """One for steps in which some adapter touches linears that few do (see `Site`), where the model has those."""
    always: bool = False
    """Whether that one runs all steps, also those without adapters: in deterministic mode on devices on which its
    layers take other launches than those of the plain decoder."""
    altered: Decoder | None = None
    """One for steps in which some adapter changes single outputs (see `adapters.vectors`) or norms."""
    captures_altered: bool = True
    """Whether slots have tables for that, so that such steps may be captured."""
    beside: int = 0
    """Bytes of the device that are to stay free for what adapters have beside their slots."""

    def with_altered(self) -> AdaptedModel:
        """The same with a decoder of that name, made when all others are connected to their ranks."""
        if self.kernel.banks.norms is None or self.further is None:
            return self
        altered = with_norms(self.further, self.kernel.banks.norms)
        if self.kernel.banks.head_norms is not None:
            altered = with_head_norms(altered, self.kernel.banks.head_norms)
        if self.kernel.banks.prefixes is not None:
            altered = with_prefixes(altered, self.kernel.banks.prefixes)
        if self.kernel.banks.adaption is not None:
            altered = with_adaption_prompts(altered, self.kernel.banks.adaption)
        return dataclasses.replace(self, altered=altered)

    def with_decoders(self, change: Callable[[Decoder], Decoder]) -> AdaptedModel:
        narrow = None if self.narrow is None else change(self.narrow)
        further = None if self.further is None else change(self.further)
        altered = None if self.altered is None else change(self.altered)
        return dataclasses.replace(self, decoder=change(self.decoder), narrow=narrow, further=further, altered=altered)


class OtherRanks(Protocol):
    """The other ranks of an engine, which keep their parts of the same adapters."""

    def put(self, slot: int, adapter: LoadedAdapter) -> None:
        """Bring theirs into a slot, before the next step."""
        ...

    def drop(self, adapter: LoadedAdapter) -> None:
        """Free their host memory."""
        ...

    def renew(self, placed: dict[LoadedAdapter, int]) -> dict[LoadedAdapter, ReplicaLost]:
        """One of them was started again and has none: read all that are in host memory, and fill their slots. Returns
        those in slots that it cannot read, and why."""
        ...


class NoDeviceMemory(PenstockError):
    """What an adapter has beside its slot does not fit."""


class AdapterRuntime:
    """What the runner needs: the adapted decoder, and a step's adapters in place."""

    def __init__(self, model: AdaptedModel, pool: AdapterPool, others: OtherRanks | None = None) -> None:
        self.model = model
        self.pool = pool
        self.decoder = model.decoder
        self.narrow = model.narrow
        self.further = model.further
        self.altered = model.altered
        self.slots = np.empty(0, np.int32)
        """Of each token of the step that has begun, or row of logits; -1 where it has no adapter."""
        self._others = others

    @property
    def room(self) -> int:
        """Tokens that adapters may have behind the model's vocabulary."""
        return 0 if self.kernel.banks.rows is None else self.kernel.banks.rows.room

    @property
    def kernel(self) -> LoraKernel:
        return self.model.kernel

    @property
    def layout(self) -> AdapterLayout:
        return self.model.layout

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def fill_slots(self) -> None:
        """Make the copies that the scheduled step relies on. They are queued before it on the same stream."""
        moves = self.pool.slots.moves
        while moves:
            slot, adapter = moves[0]
            try:
                self.kernel.put(slot, adapter)
            except torch.OutOfMemoryError as error:  # smaller steps would not help
                raise NoDeviceMemory(
                    f"adapter {adapter.name} does not fit into device memory beside the model: raise adapter_memory, "
                    "lower memory_share or kv_memory, or merge the adapter into the model"
                ) from error
            if self._others is not None:
                self._others.put(slot, adapter)
            del moves[0]  # only now: a copy that failed is made again

    def renew(self) -> None:
        """Another rank was started again: give it what it had."""
        if self._others is not None:
            for adapter, problem in self._others.renew(self.pool.slots.placed).items():
                if not self.pool.registry.discard(adapter):
                    raise problem

    def touches_further(self, batch: Batch) -> bool:
        """Whether a batch needs the decoder of that name."""
        adapters = (chunk.adapter for chunk in batch.chunks)
        return self.model.always or any(adapter is not None and adapter.further for adapter in adapters)

    def by_host(self, batch: Batch) -> bool:
        """Whether some adapter of a batch does what only the host can (`LoadedAdapter.by_host`): it is neither recorded
        nor captured."""
        adapters = (chunk.adapter for chunk in batch.chunks)
        return any(adapter is not None and adapter.by_host for adapter in adapters)

    def alters(self, batch: Batch) -> bool:
        """Whether some adapter of a batch changes single outputs of linears, their inputs, norms, what the cache begins
        with, or what queries see."""
        adapters = {chunk.adapter for chunk in batch.chunks} - {None}
        return any(
            each is not None
            for one in adapters
            if one is not None
            for each in (one.vectors, one.norms, one.inputs, one.head_norms, one.prefix, one.adaption)
        )

    def on_head(self, decoder: Decoder) -> bool:
        """Whether logits behind a decoder have adapters."""
        return self.further is not None and (decoder is self.further or decoder is self.altered)

    def head(self, slots: np.ndarray) -> Linear:
        """The head for rows of logits with these slots."""
        assert self.further is not None
        self.begin_head(slots)
        rows = self.kernel.banks.rows
        return self.further.head if rows is None else BoundedHead(self.further.head, rows, self.further.config)

    def begin_head(self, slots: np.ndarray) -> None:
        """Prepare the kernel for logits of rows with these slots."""
        self.slots = slots
        self.kernel.begin_head(slots)

    def begin(self, batch: Batch) -> Decoder | None:
        """Prepare the kernel for a batch; the decoder that runs it, None when no sequence of it uses an adapter."""
        slots = slots_of(batch)
        if slots.max() < 0 and not self.model.always:
            return None
        self.slots = slots
        self.kernel.begin(slots)
        if self.altered is not None and self.alters(batch):
            return self.altered
        if self.further is not None and self.touches_further(batch):
            return self.further
        return self.narrow if self.narrow is not None and is_narrow(batch) else self.decoder


def is_narrow(batch: Batch) -> bool:
    """Whether all adapters of a batch are; see `LoadedAdapter`."""
    adapters = (chunk.adapter for chunk in batch.chunks)
    return all(adapter is None or adapter.narrow for adapter in adapters)


def slots_of(batch: Batch) -> np.ndarray:
    """The adapter slot of each packed token; -1 where there is none."""
    slots = np.array([chunk.slot for chunk in batch.chunks], np.int32)
    return np.repeat(slots, [chunk.length for chunk in batch.chunks])
