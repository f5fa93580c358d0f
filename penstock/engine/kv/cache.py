"""The cache of a decoder: the memory of all its layers, whatever their kinds (`kinds`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.engine.kv.kinds import BothKinds, CacheKind, CacheTensors, OfLayer, PagedKV, PagedRows


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The cache kind of every layer, which decides all sizes."""

    kinds: tuple[CacheKind, ...]
    block_size: int

    @classmethod
    def of_paged_kv(cls, layers: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> CacheShape:
        """Of layers that all have the same paged keys and values."""
        return cls((PagedKV(kv_heads, head_dim, block_size, dtype),) * layers, block_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of tokens in all layers."""
        return sum(kind.block_bytes for kind in self.kinds)

    @property
    def state_bytes(self) -> int:
        """Bytes of one state in all layers; a running sequence has one beside its blocks."""
        return sum(kind.state_bytes for kind in self.kinds)

    @property
    def blocks_suffice(self) -> bool:
        """Whether a sequence's blocks are all that is kept of it; else another sequence can continue from them only
        where a state was kept too (`kv.states`)."""
        return self.state_bytes == 0

    def __str__(self) -> str:
        kept = (kind for kind in self.kinds if not isinstance(kind, OfLayer))
        layers = ", ".join(f"{count} layers of {kind}" for kind, count in Counter(kept).items())
        return f"{layers}, {self.block_size} tokens in a block"


class KVCache:
    """Allocates the cache. Block 0 is reserved: padding is written there."""

    def __init__(self, shape: CacheShape, num_blocks: int, device: torch.device, num_states: int = 2) -> None:
        """`num_states`: slots of states, for recurrent layers. Slot 0 is reserved: it stands for no state."""
        self.shape = shape
        self.num_blocks = num_blocks
        self.num_states = num_states
        self.device = device
        self.tensors: list[Tensor] = []
        """Everything a block consists of; the third axis of each is the block."""
        self.states: list[Tensor] = []
        """Everything a state consists of; the third axis of each is its slot."""
        layers: dict[CacheKind, Iterator[Any]] = {}
        for kind, count in Counter(shape.kinds).items():
            allocated = kind.allocate(count, num_blocks, num_states, device)
            self.tensors += allocated.blocks
            self.states += allocated.states
            layers[kind] = iter(allocated.layers)
        self.layers: list[Any] = [next(layers[kind]) for kind in shape.kinds]
        """By layer of the decoder: what its mixer is called with."""
        for index, kind in enumerate(shape.kinds):
            if isinstance(kind, OfLayer):
                self.layers[index] = self.first_of(kind.layer)
            elif isinstance(kind, BothKinds) and isinstance(kind.first, OfLayer):
                self.layers[index] = self.first_of(kind.first.layer), self.layers[index][1]

    def first_of(self, layer: int) -> Any:
        """What another layer shares of its cache."""
        return self.layers[layer][0] if isinstance(self.shape.kinds[layer], BothKinds) else self.layers[layer]

    @property
    def block_size(self) -> int:
        return self.shape.block_size

    def of_layers(self, begin: int, end: int) -> KVCache:
        """The same memory for a decoder that has only some of the layers."""
        part = copy(self)
        part.layers = self.layers[begin:end]
        return part


@dataclass(frozen=True, slots=True)
class _WholeState:
    """A cache kind: all states of a sequence as one block."""

    block_bytes: int
    state_bytes: int = 0

    def allocate(self, layers: int, num_blocks: int, num_states: int, device: torch.device) -> CacheTensors:
        raise NotImplementedError("states are allocated with the cache that they belong to")


class StateBlocks(KVCache):
    """The states of a cache as blocks that can be moved: slot `s` is block `s`."""

    def __init__(self, kv: KVCache) -> None:
        self.shape = CacheShape((_WholeState(kv.shape.state_bytes),), kv.shape.block_size)
        self.num_blocks = kv.num_states
        self.num_states = 0
        self.device = kv.device
        self.tensors = kv.states
        self.states = []
        self.layers = []


def without_rows(kv: KVCache) -> tuple[KVCache, KVCache | None]:
    """A cache without the rows that it keeps of the tokens of several caches (`models.tap`), and these: their blocks
    are those of all caches, numbered through. None where each block has its own rows, or there are none."""
    shape, kind = kv.shape, kv.shape.kinds[-1]
    if not isinstance(kind, PagedRows) or kind.block_size == shape.block_size:
        return kv, None
    own, rows = copy(kv), copy(kv)
    own.shape = replace(shape, kinds=shape.kinds[:-1])
    own.tensors = kv.tensors[:-1]
    rows.shape = CacheShape((replace(kind, block_size=shape.block_size),), shape.block_size)
    rows.num_blocks = kv.num_blocks * (kind.block_size // shape.block_size)
    rows.tensors = [kv.tensors[-1].view(1, 1, rows.num_blocks, shape.block_size, kind.width)]
    rows.states, rows.layers = [], []
    return own, rows
