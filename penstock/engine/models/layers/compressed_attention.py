"""Attention to a window and to entries that stand for several tokens (DeepSeek V4); see `CompressionOps`.

One key per token is also its value, for all heads. The window's keys and the groups that are not complete are a state
of the sequence; entries lie in its blocks. Outputs are projected by runs of heads, then together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.interface import (
    AttentionBatch,
    CompressionCache,
    CompressionLayout,
    Entries,
    EntryIndex,
    Ops,
    PoolInputs,
    PoolState,
)
from penstock.engine.kv.kinds import BothKinds, CacheKind, PagedEntries, PagedLatent, PagedLatentCache, StateTensors
from penstock.engine.models.layers.linear import Linear


def kept_kind(
    window: int, head_dim: int, rate: int, index_dim: int, block_size: int, dtype: torch.dtype, made: torch.dtype
) -> CacheKind:
    """What a layer keeps. `rate`: 0 where there are no entries; `index_dim`: 0 where nothing chooses them; `made`: of
    the activations."""
    keys = ((window, head_dim), made)
    if not rate:
        return StateTensors((keys,))
    entries: CacheKind = PagedEntries(head_dim, rate, block_size, dtype)
    if not index_dim:
        return BothKinds(entries, StateTensors((keys, *_open_groups(head_dim, overlapping=False))))
    groups = *_open_groups(head_dim, overlapping=True), *_open_groups(index_dim, overlapping=True)
    index_keys = PagedEntries(index_dim, rate, block_size, made)
    return BothKinds(BothKinds(entries, index_keys), StateTensors((keys, *groups)))


def _open_groups(dim: int, *, overlapping: bool) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """What a pool keeps of groups that are not complete."""
    return (((3, 2 * dim), torch.float32), ((3, dim), torch.float32)) if overlapping else (((3, dim), torch.float32),)


@dataclass(frozen=True, slots=True)
class EntryPool:
    """What makes entries of tokens."""

    linear: Linear
    """Values, then gates."""
    bias: Tensor
    norm: Tensor

    def __call__(self, x: Tensor) -> PoolInputs:
        values, gates = self.linear(x).chunk(2, -1)
        return PoolInputs(values, gates, self.bias, self.norm)

    @property
    def overlapping(self) -> bool:
        return self.bias.shape[1] > self.norm.shape[0]

    def state(self, tensors: list[Tensor]) -> PoolState:
        """Takes its own of what a layer has."""
        return PoolState(tensors.pop(0), tensors.pop(0) if self.overlapping else None)


@dataclass(frozen=True, slots=True)
class EntryIndexer:
    """What chooses entries."""

    pool: EntryPool
    queries: Linear
    """From the narrow vector that the queries of attention are made of."""
    head_weights: Linear
    most: int

    def __call__(self, x: Tensor, narrow: Tensor) -> EntryIndex:
        weights = self.head_weights(x)
        return EntryIndex(self.pool(x), self.queries(narrow), weights, weights.shape[1], self.most)


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """See `TokenMixer`."""

    ops: Ops
    inputs: Linear
    """The narrow vector that queries are made of, then the key."""
    query_up: Linear
    output_down: Tensor
    """[runs of heads, rank, dimensions of a run]."""
    output: Linear
    layout: CompressionLayout
    query_norm: Tensor
    key_norm: Tensor
    sinks: Tensor
    """float32 [heads]."""
    cos_sin: Tensor
    pool: EntryPool | None = None
    indexer: EntryIndexer | None = None
    cache_scale: Tensor | None = None
    """With an FP8 cache: what entries are divided by, float32 [1]."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        pool = () if self.pool is None else (self.pool.linear,)
        index = () if self.indexer is None else (self.indexer.pool.linear, self.indexer.queries)
        return self.inputs, self.query_up, self.output, *pool, *index

    @property
    def weight_bytes(self) -> int:
        dense: int = self.output_down.numel() * self.output_down.element_size()
        weights = 0 if self.indexer is None else self.indexer.head_weights.weight_bytes
        return dense + weights + sum(linear.weight_bytes for linear in self.linears)

    def cache_kind(self, block_size: int, dtype: torch.dtype) -> CacheKind:
        layout, made = self.layout, self.key_norm.dtype
        index_dim = 0 if self.indexer is None else self.indexer.pool.norm.shape[0]
        return kept_kind(layout.window, layout.head_dim, layout.rate, index_dim, block_size, dtype, made)

    def forward(self, x: Any, batch: AttentionBatch, cache: Any) -> Tensor:
        narrow, keys = self._projected(x)
        seen = self.ops.compressed_attention(
            self.query_up(narrow),
            keys,
            self.layout,
            self.sinks,
            self.cos_sin,
            batch,
            self._cache(cache),
            None if self.pool is None else self.pool(x),
            None if self.indexer is None else self.indexer(x, narrow),
        )
        return self._out(seen)

    def _projected(self, x: Any) -> tuple[Tensor, Tensor]:
        """The narrow vector, and keys; both normalized."""
        made, rank = self.inputs(x), self.query_norm.shape[0]
        narrow = self.ops.rms_norm(made[:, :rank], self.query_norm, self.layout.eps)
        return narrow, self.ops.rms_norm(made[:, rank:], self.key_norm, self.layout.eps)

    def _out(self, seen: Tensor) -> Tensor:
        runs = [seen[at : at + 1] for at in range(len(seen))] if self.ops.batch_invariant else [seen]
        return self.output(torch.cat([self._down(run) for run in runs]))

    def _down(self, seen: Tensor) -> Tensor:
        groups = seen.view(len(seen), len(self.output_down), -1).transpose(0, 1)
        return torch.bmm(groups, self.output_down.transpose(1, 2)).transpose(0, 1).flatten(1)

    def _cache(self, cache: Any) -> CompressionCache:
        """`cache`: of `cache_kind`."""
        if self.pool is None:
            return CompressionCache(cache[0])
        blocks, (window, *rest) = cache
        entries, keys = blocks if self.indexer is not None else (blocks, None)
        if entries.scales is None and self.cache_scale is not None:
            entries = Entries(entries.rows, self.cache_scale, entries.block_size)
        pool = self.pool.state(rest)
        index = None if self.indexer is None else self.indexer.pool.state(rest)
        return CompressionCache(window, entries, pool, keys, index)


@dataclass(frozen=True, slots=True)
class PagedWindowAttention(CompressedAttention):
    """The same with the window alone, whose keys lie in blocks."""

    def cache_kind(self, block_size: int, dtype: torch.dtype) -> CacheKind:
        return PagedLatent(self.layout.head_dim, block_size, self.key_norm.dtype)

    def forward(self, x: Any, batch: AttentionBatch, cache: PagedLatentCache) -> Tensor:
        narrow, keys = self._projected(x)
        return self._out(
            self.ops.paged_window_attention(
                self.query_up(narrow), keys, self.layout, self.sinks, self.cos_sin, batch, cache.latents
            )
        )
