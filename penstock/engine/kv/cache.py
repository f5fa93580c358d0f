"""The KV cache as tensors: what a layer reads and writes, in how many bytes.

Keys and values lie in blocks. An int8 cache has a second tensor beside them: one scale per token and KV head, computed
from the numbers themselves when they are written, so that no calibration is needed and one large token does not cost
the others their precision. Invariant: block `b` of the scales belongs to block `b` of the values, they move together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.backends.host_memory import zeros
from penstock.engine.backends.interface import INT8, SCALE_DTYPE, KVScales


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's share."""

    k: Tensor
    """[num_blocks, kv_heads, block_size, head_dim]; so is `v`."""
    v: Tensor
    scales: KVScales | None
    """Of an int8 cache: [num_blocks, kv_heads, block_size] each."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What decides the bytes of a block."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_number(self) -> float:
        """Of one key or value element, its share of the scale included."""
        return self.dtype.itemsize + (SCALE_DTYPE.itemsize / self.head_dim if self.dtype == INT8 else 0)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers, scales included."""
        return round(2 * self.layers * self.kv_heads * self.block_size * self.head_dim * self.bytes_per_number)


class KVCache:
    """The cache of all layers of one decoder."""

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        per_block = (shape.kv_heads, shape.block_size)
        self.values = zeros((shape.layers, 2, num_blocks, *per_block, shape.head_dim), shape.dtype, device)
        """[layers, 2, num_blocks, kv_heads, block_size, head_dim]: keys, then values."""
        self.scales: Tensor | None = None
        if shape.dtype == INT8:
            self.scales = zeros((shape.layers, 2, num_blocks, *per_block), SCALE_DTYPE, device)
        self.layers = [self._layer(index) for index in range(shape.layers)]

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def block_size(self) -> int:
        return self.shape.block_size

    @property
    def tensors(self) -> list[Tensor]:
        """Everything a block consists of; the third axis of each is the block."""
        return [self.values] if self.scales is None else [self.values, self.scales]

    def _layer(self, index: int) -> LayerCache:
        scales = None if self.scales is None else (self.scales[index, 0], self.scales[index, 1])
        return LayerCache(self.values[index, 0], self.values[index, 1], scales)
