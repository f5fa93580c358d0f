"""Which part of every block and of every state of the cache each rank has (`kv.block_part`), from the model's shape.

Stages have runs of layers, of which some keep blocks and some states; a rank may have none of one kind. Shards have
runs of KV heads, and the heads and channels of recurrent layers that their weights were cut to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from penstock.engine.backends.interface import INT8, SCALE_DTYPE
from penstock.engine.kv.block_part import BlockPart, Span, TensorPart
from penstock.engine.kv.cache import CacheShape
from penstock.engine.kv.kinds import (
    BothKinds,
    CacheKind,
    ConvolutionState,
    PagedKV,
    PagedLatent,
    PagedRows,
    RecurrentState,
)
from penstock.engine.models.attention_config import IndexConfig
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.parallel.layer_cuts import delta_cuts, mamba_spans
from penstock.engine.parallel.layout import Place, even_span, kv_head_span, stage_span


@dataclass(frozen=True, slots=True)
class CacheParts:
    """What ranks have of the cache of a model: sizes that are the same on all of them."""

    model: ModelConfig
    block_size: int
    kv_dtype: torch.dtype
    dtype: torch.dtype
    """Of the activations, and so of the inputs that convolutions keep."""
    rows: PagedRows | None = None
    """On rank 0: what a drafter reads of a block, which no other rank has (`models.tap`)."""

    def blocks(self, place: Place) -> BlockPart:
        """What `place` has of every block."""
        model, size = self.model, self.block_size
        if model.latent is not None and model.latent.index is not None:
            found = self._indexed(model.latent.index, place)
            if self.rows is not None:
                found.append(self._rows(self.rows, place))
            return BlockPart(tuple(found))
        if model.latent is None:
            heads = kv_head_span(model, place)
            shards = (replace(place, rank=shard) for shard in range(place.tensor))
            first = next(other.shard for other in shards if kv_head_span(model, other) == heads)
            num_units, rows, width = model.num_kv_heads, 2, model.head_dim
        else:
            heads, first, num_units, rows, width = (0, 1), 0, 1, 1, model.latent.rank + model.latent.rotary
        # An int8 cache has a second tensor, of one scale for each token and head.
        sizes = [size * width * self.kv_dtype.itemsize] + [size * SCALE_DTYPE.itemsize] * (self.kv_dtype == INT8)
        layers, total = self._layers(place, recurrent=False)
        gives = place.data or first == place.shard
        found = [TensorPart(total, num_units, layers, (heads,), rows, each, gives) for each in sizes]
        if self.rows is not None:  # where each shard has blocks of its own, rank 0 keeps the rows of all apart
            found.append(self._rows(self.rows, place))
        return BlockPart(tuple(found))

    def _indexed(self, index: IndexConfig, place: Place) -> list[TensorPart]:
        """Latents and index keys, which every shard has whole. The layers with an indexer come first, then the others,
        as the cache has the tensors of each kind."""
        latent, size = self.model.latent, self.block_size
        assert latent is not None
        begin, end = stage_span(self.model, place)
        found = []
        for own in (True, False):
            total, before = index.layers.count(own), index.layers[:begin].count(own)
            layers = before, before + index.layers[begin:end].count(own)
            sizes = [size * (latent.rank + latent.rotary) * self.kv_dtype.itemsize]
            sizes += [size * SCALE_DTYPE.itemsize] * (self.kv_dtype == INT8)
            sizes += [size * index.dim * self.dtype.itemsize] * own
            gives = place.data or place.shard == 0
            found += [TensorPart(total, 1, layers, ((0, 1),), 1, each, gives) for each in sizes if total]
        return found

    def rows_alone(self) -> BlockPart:
        """Of every block, what a drafter reads."""
        assert self.rows is not None
        alone = Place(0, 1, 1)
        *others, _ = self.blocks(alone).tensors
        return BlockPart((*(replace(part, layers=(0, 0)) for part in others), self._rows(self.rows, alone)))

    def _rows(self, rows: PagedRows, place: Place) -> TensorPart:
        """With the blocks of rank 0, where these are those of all sequences."""
        size, here = self.block_size * rows.width * rows.dtype.itemsize, place.rank == 0 and not place.data
        return TensorPart(1, 1, (0, int(here)), ((0, 1),), 1, size)

    def states(self, place: Place) -> BlockPart:
        """What `place` has of every state."""
        layers, total = self._layers(place, recurrent=True)
        state, cut = self._state(), self._channels(place)
        if isinstance(state, ConvolutionState):
            return BlockPart((TensorPart(total, state.channels, layers, cut, state.width, self.dtype.itemsize),))
        return BlockPart(
            (
                TensorPart(
                    total, state.heads, layers, (even_span(state.heads, place),), 1, 4 * state.rows * state.columns
                ),
                TensorPart(total, state.channels, layers, cut, state.width, self.dtype.itemsize),
            )
        )

    def whole(self) -> CacheShape:
        """The cache as one device would have it."""
        model, size = self.model, self.block_size
        attends: CacheKind = PagedKV(model.num_kv_heads, model.head_dim, size, self.kv_dtype)
        if model.latent is not None:
            attends = PagedLatent(model.latent.rank + model.latent.rotary, size, self.kv_dtype)
        kinds: list[CacheKind] = [attends] * model.num_layers
        if model.latent is not None and model.latent.index is not None:
            index = model.latent.index
            with_keys = BothKinds(attends, PagedRows(index.dim, size, self.dtype))
            kinds = [with_keys if own else attends for own in index.layers]
        if model.recurrent:
            state: CacheKind = BothKinds(attends, self._state()) if self._beside else self._state()
            kinds = [state if recurrent else attends for recurrent in self._recurrent]
        return self._shape(kinds)

    def _shape(self, kinds: Iterable[CacheKind]) -> CacheShape:
        """With what a drafter reads."""
        rows = () if self.rows is None else (replace(self.rows, block_size=self.block_size),)
        return CacheShape((*kinds, *rows), self.block_size)

    def _state(self) -> RecurrentState | ConvolutionState:
        """Of one layer of the whole model."""
        delta, mamba, short = self.model.delta, self.model.mamba, self.model.short_conv
        if short is not None:
            return ConvolutionState(short.channels, short.width, self.dtype)
        if delta is not None:
            channels = 2 * delta.k_heads * delta.k_dim + delta.v_heads * delta.v_dim
            return RecurrentState(delta.v_heads, delta.k_dim, delta.v_dim, channels, delta.conv, self.dtype)
        assert mamba is not None, "a model without recurrent layers has no states"
        return RecurrentState(mamba.heads, mamba.head_dim, mamba.state, mamba.channels, mamba.conv, self.dtype)

    def _channels(self, place: Place) -> tuple[Span, ...]:
        """The channels of the convolution that `place` has."""
        if self.model.delta is not None:
            return delta_cuts(self.model.delta, place)["conv1d"].outputs or ()
        if self.model.short_conv is not None:
            return (even_span(self.model.short_conv.channels, place),)
        assert self.model.mamba is not None
        return tuple(mamba_spans(self.model.mamba, place))

    @property
    def _recurrent(self) -> tuple[bool, ...]:
        """Which layers are."""
        of = self.model.delta or self.model.mamba or self.model.short_conv
        return (False,) * self.model.num_layers if of is None else of.layers

    @property
    def _beside(self) -> bool:
        """Whether recurrent layers have attention too."""
        return self.model.mamba is not None and self.model.mamba.beside is not None

    def _layers(self, place: Place, *, recurrent: bool) -> tuple[Span, int]:
        """The layers of a stage among all those that keep states, or blocks, and how many these are."""
        kinds = self._recurrent
        if self._beside and not recurrent:  # all layers attend
            kinds = (False,) * len(kinds)
        begin, end = stage_span(self.model, place)
        before, here = kinds[:begin].count(recurrent), kinds[begin:end].count(recurrent)
        return (before, before + here), kinds.count(recurrent)
