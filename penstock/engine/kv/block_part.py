"""Which part of every block one rank of an engine holds, and where that lies in a whole block.

A whole block, as engines hand it over, does not depend on how the model is spread over devices: for each tensor of the
cache, all layers in order, keys then values, all KV heads in order. A rank has a run of layers and a run of heads.
Latents are one KV head, of which there are not two but one: every shard has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from penstock.engine.kv.cache import CacheShape
from penstock.engine.kv.kinds import PagedKV, PagedLatent

Span = tuple[int, int]
"""First and one past the last."""


@dataclass(frozen=True, slots=True)
class BlockPart:
    """One rank's part of every block."""

    num_layers: int
    num_heads: int
    """KV heads of the whole model, as its layers."""
    layers: Span
    heads: Span
    gives: bool = True
    """Whether it is this rank that supplies them for whole blocks: with more shards than KV heads several have one."""
    kinds: int = 2
    """Keys and values, or latents alone."""

    def of(self, whole: memoryview | bytes) -> npt.NDArray[np.uint8]:
        """This part of one tensor's piece of a whole block, as a view: [layers, kinds, heads, bytes]."""
        parts = np.frombuffer(whole, np.uint8).reshape(self.num_layers, self.kinds, self.num_heads, -1)
        return parts[slice(*self.layers), :, slice(*self.heads)]

    def alone(self, piece: memoryview | bytes) -> npt.NDArray[np.uint8]:
        """The same of a block that consists of this part only."""
        layers, heads = (end - begin for begin, end in (self.layers, self.heads))
        return np.frombuffer(piece, np.uint8).reshape(layers, self.kinds, heads, -1)


def whole_shape(shape: CacheShape, part: BlockPart) -> CacheShape:
    """Of the model whose part has `shape`."""
    (kind,) = set(shape.kinds)
    if isinstance(kind, PagedLatent):
        return CacheShape((kind,) * part.num_layers, shape.block_size)
    assert isinstance(kind, PagedKV), "only attention is cut by heads"
    return CacheShape((replace(kind, kv_heads=part.num_heads),) * part.num_layers, shape.block_size)
