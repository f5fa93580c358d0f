"""Cache kinds: what a layer keeps of earlier tokens, and what that costs.

A kind names the bytes that a block of tokens and a running sequence need in one layer, so that the cache can be sized
before it exists, and allocates the tensors. `PagedKV`: keys and values in blocks that sequences may share.
`PagedLatent`: one vector per token in such blocks (MLA).
`PagedEntries`: one vector for every few tokens.
`RecurrentState`, `ConvolutionState`: nothing per token, and a state in a slot, which `StateBatch` names; slots also
hold the states that were kept at the ends of blocks (`kv.states`). `StateTensors`: the same, of any shapes.
`NothingKept`: of a layer that is a feed-forward alone. `OfLayer`: of one that shares the cache of another.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.backends.host_memory import zeros
from penstock.engine.backends.interface import INT8, SCALE_DTYPE, Entries, KVScales


@dataclass(frozen=True, slots=True)
class CacheTensors:
    """The memory of some layers of one kind."""

    layers: list[Any]
    """What each layer's mixer is called with."""
    blocks: list[Tensor] = field(default_factory=list)
    """Everything a block of tokens consists of; the third axis of each is the block."""
    states: list[Tensor] = field(default_factory=list)
    """Everything a state consists of; the third axis of each is the slot."""


class CacheKind(Protocol):
    """Of one layer. Equal kinds are allocated together; `str` says what two engines must agree on to share blocks."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of tokens; 0 where nothing is kept per token."""
        ...

    @property
    def state_bytes(self) -> int:
        """Bytes of one state, whatever the length of its sequence; 0 where everything is kept per token."""
        ...

    def allocate(self, layers: int, num_blocks: int, num_states: int, device: torch.device) -> CacheTensors:
        """Zeroed memory for `layers` layers of this kind."""
        ...


@dataclass(frozen=True, slots=True)
class PagedKVCache:
    """One layer's keys and values."""

    k: Tensor
    """[num_blocks, kv_heads, block_size, head_dim]; so is `v`."""
    v: Tensor
    scales: KVScales | None
    """Of an int8 cache: [num_blocks, kv_heads, block_size] each."""


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values in blocks of tokens.

    An int8 cache has a second tensor: one scale per token and KV head, computed from the numbers themselves when they
    are written, so that no calibration is needed and one large token does not cost the others their precision.
    Invariant: block `b` of the scales belongs to block `b` of the values; they move together.
    """

    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.kv_heads} heads of {self.head_dim} in {str(self.dtype).removeprefix('torch.')}"

    @property
    def element_bytes(self) -> float:
        """Of one key or value element, its share of the scale included."""
        return self.dtype.itemsize + (SCALE_DTYPE.itemsize / self.head_dim if self.dtype == INT8 else 0)

    @property
    def block_bytes(self) -> int:
        return round(2 * self.kv_heads * self.block_size * self.head_dim * self.element_bytes)

    @property
    def state_bytes(self) -> int:
        return 0

    def allocate(self, layers: int, num_blocks: int, num_states: int, device: torch.device) -> CacheTensors:
        shape = (layers, 2, num_blocks, self.kv_heads, self.block_size)
        values = zeros((*shape, self.head_dim), self.dtype, device)
        if self.dtype != INT8:
            return CacheTensors([PagedKVCache(k, v, None) for k, v in values], [values])
        scales = zeros(shape, SCALE_DTYPE, device)
        found = zip(values, scales, strict=True)
        return CacheTensors([PagedKVCache(k, v, (ks, vs)) for (k, v), (ks, vs) in found], [values, scales])


@dataclass(frozen=True, slots=True)
class RecurrentCache:
    """One layer's states; see `Ops.delta_net`."""

    conv: Tensor
    """[slots, width, channels]."""
    state: Tensor
    """float32 [slots, heads, rows, columns]."""


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The state of a recurrent layer: a matrix for each head, and the last inputs of its convolution."""

    heads: int
    rows: int
    columns: int
    channels: int
    width: int
    dtype: torch.dtype
    """Of the convolution's inputs; matrices are float32."""

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"states of {self.heads} x {self.rows} x {self.columns} and {self.width} x {self.channels} in {kind}"

    @property
    def block_bytes(self) -> int:
        return 0

    @property
    def state_bytes(self) -> int:
        return 4 * self.heads * self.rows * self.columns + self.dtype.itemsize * self.channels * self.width

    def allocate(self, layers: int, num_blocks: int, num_states: int, device: torch.device) -> CacheTensors:
        state = zeros((layers, 1, num_states, self.heads, self.rows, self.columns), torch.float32, device)
        conv = zeros((layers, 1, num_states, self.width, self.channels), self.dtype, device)
        found = zip(conv[:, 0], state[:, 0], strict=True)
        return CacheTensors([RecurrentCache(*parts) for parts in found], states=[state, conv])


@dataclass(frozen=True, slots=True)
class StateTensors:
    """A state of tensors of any shapes and types, as another library's code keeps it. A layer is called with a list of
    them, [slots, *shape] each."""

    parts: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    """Their shapes, of one dimension at least, and types."""

    def __str__(self) -> str:
        parts = Counter(f"{list(shape)} in {str(dtype).removeprefix('torch.')}" for shape, dtype in self.parts)
        return "states of " + " and ".join(f"{count} x {part}" for part, count in parts.items())

    @property
    def block_bytes(self) -> int:
        return 0

    @property
    def state_bytes(self) -> int:
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.parts)

    def allocate(self, layers: int, num_blocks: int, num_states: int, device: torch.device) -> CacheTensors:
        together = {
            part: zeros((layers, count, num_states, *part[0]), part[1], device)
            for part, count in Counter(self.parts).items()
        }
        found = []
        for layer in range(layers):
            left = {part: iter(tensor[layer]) for part, tensor in together.items()}
            found.append([next(left[part]) for part in self.parts])
        return CacheTensors(found, states=list(together.values()))


@dataclass(frozen=True, slots=True)
class ConvolutionState:
    """The state of a short convolution: its last inputs. A layer is called with [slots, width, channels]; see
    `Ops.short_conv`."""

    channels: int
    width: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"states of {self.width} x {self.channels} in {str(self.dtype).removeprefix('torch.')}"

    @property
    def block_bytes(self) -> int:
        return 0

    @property
    def state_bytes(self) -> int:
        return self.dtype.itemsize * self.channels * self.width

    def allocate(self, layers: int, num_blocks: int, num_states: int, device: torch.device) -> CacheTensors:
        conv = zeros((layers, 1, num_states, self.width, self.channels), self.dtype, device)
        return CacheTensors(list(conv[:, 0]), states=[conv])


@dataclass(frozen=True, slots=True)
class NothingKept:
    """Of a layer that has no mixer."""

    def __str__(self) -> str:
        return "nothing"

    @property
    def block_bytes(self) -> int:
        return 0

    @property
    def state_bytes(self) -> int:
        return 0

    def allocate(self, layers: int, num_blocks: int, num_states: int, device: torch.device) -> CacheTensors:
        return CacheTensors([None] * layers)


@dataclass(frozen=True, slots=True)
class OfLayer(NothingKept):
    """Of a layer that is called with the cache of another one, before it; where that has two, with the first of
    them."""

    layer: int

    def __str__(self) -> str:
        return f"what layer {self.layer} keeps"


@dataclass(frozen=True, slots=True)
class BothKinds:
    """Of a layer that has two mixers: it is called with the cache of each."""

    first: CacheKind
    second: CacheKind

    def __str__(self) -> str:
        return f"{self.first} and {self.second}"

    @property
    def block_bytes(self) -> int:
        return self.first.block_bytes + self.second.block_bytes

    @property
    def state_bytes(self) -> int:
        return self.first.state_bytes + self.second.state_bytes

    def allocate(self, layers: int, num_blocks: int, num_states: int, device: torch.device) -> CacheTensors:
        one, two = (kind.allocate(layers, num_blocks, num_states, device) for kind in (self.first, self.second))
        return CacheTensors(
            list(zip(one.layers, two.layers, strict=True)), one.blocks + two.blocks, one.states + two.states
        )


@dataclass(frozen=True, slots=True)
class PagedRows:
    """One vector per token, in blocks of tokens: what a drafter reads of the model (`models.tap`).

    A layer is called with [slots, width], the rows of all blocks one after the other.
    """

    width: int
    block_size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"rows of {self.width} in {str(self.dtype).removeprefix('torch.')}"

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.width * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        return 0

    def allocate(self, layers: int, num_blocks: int, num_states: int, device: torch.device) -> CacheTensors:
        rows = zeros((layers, 1, num_blocks, self.block_size, self.width), self.dtype, device)
        return CacheTensors([layer.view(-1, self.width) for layer in rows], [rows])


@dataclass(frozen=True, slots=True)
class PagedLatentCache:
    """One layer's latents."""

    latents: Tensor
    """[num_blocks, block_size, width]."""
    scales: Tensor | None
    """Of an int8 cache: [num_blocks, block_size]."""


@dataclass(frozen=True, slots=True)
class PagedLatent:
    """One vector per token in blocks of tokens: what all heads' keys and values are made of, and a rotated key.

    Every shard of a layer has the whole of it. An int8 cache has one scale per token beside it, as `PagedKV` does.
    """

    width: int
    block_size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"latents of {self.width} in {str(self.dtype).removeprefix('torch.')}"

    @property
    def element_bytes(self) -> float:
        """Of one element, its share of the scale included."""
        return self.dtype.itemsize + (SCALE_DTYPE.itemsize / self.width if self.dtype == INT8 else 0)

    @property
    def block_bytes(self) -> int:
        return round(self.block_size * self.width * self.element_bytes)

    @property
    def state_bytes(self) -> int:
        return 0

    def allocate(self, layers: int, num_blocks: int, num_rows: int, device: torch.device) -> CacheTensors:
        shape = (layers, 1, num_blocks, self.block_size)
        latents = zeros((*shape, self.width), self.dtype, device)
        if self.dtype != INT8:
            return CacheTensors([PagedLatentCache(one[0], None) for one in latents], [latents])
        scales = zeros(shape, SCALE_DTYPE, device)
        found = zip(latents, scales, strict=True)
        return CacheTensors([PagedLatentCache(one[0], scale[0]) for one, scale in found], [latents, scales])


@dataclass(frozen=True, slots=True)
class PagedEntries:
    """One vector for every `rate` tokens, in the block that holds the last of them; see `Entries`, which a layer is
    called with. A block has places for as many as may end in it."""

    width: int
    rate: int
    block_size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"entries of {self.width} for {self.rate} tokens in {str(self.dtype).removeprefix('torch.')}"

    @property
    def block_bytes(self) -> int:
        return self._places.block_bytes

    @property
    def state_bytes(self) -> int:
        return 0

    def allocate(self, layers: int, num_blocks: int, num_states: int, device: torch.device) -> CacheTensors:
        made = self._places.allocate(layers, num_blocks, num_states, device)
        found: list[PagedLatentCache] = made.layers
        return CacheTensors([Entries(one.latents, one.scales, self.block_size) for one in found], made.blocks)

    @property
    def _places(self) -> PagedLatent:
        return PagedLatent(self.width, -(-self.block_size // self.rate), self.dtype)
