"""The indexer of a layer: what chooses the cached tokens that attention over latents sees (DSA).

Its key of every token is cached beside the latents, whether or not something has to be chosen yet. Queries and the
weights of its heads are made only when a context is longer than what may be chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import (
    AttentionBatch,
    Chosen,
    HeadScales,
    IndexLayout,
    IndexNorm,
    Ops,
    PooledIndexLayout,
    PoolInputs,
    PoolState,
)
from penstock.engine.kv.kinds import BothKinds, CacheKind, PagedEntries, PagedLatent, PagedRows, StateTensors
from penstock.engine.models.layers.linear import Linear


def pool_keys_kind(dim: int, rate: int, block_size: int, made: torch.dtype) -> CacheKind:
    """What an indexer of pools keeps: their keys, and the softmaxes of the pool that is not complete. `made`: of the
    activations."""
    return BothKinds(PagedEntries(dim, rate, block_size, made), StateTensors((((3, dim), torch.float32),)))


@dataclass(frozen=True, slots=True)
class Indexer:
    """Reads what its layer's attention reads."""

    ops: Ops
    layout: IndexLayout
    keys: Linear
    norm: IndexNorm
    queries: Linear
    """From the narrow vector that the queries of attention are made of, or with `input_norm` from what the layer
    reads."""
    head_weights: Linear
    cos_sin: Tensor
    input_norm: IndexNorm | None = None
    scales: HeadScales | None = None
    """Of queries."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.keys, self.queries

    @property
    def weight_bytes(self) -> int:
        """Of its matrices that are not among `linears`."""
        return self.head_weights.weight_bytes

    def cache_kind(self, block_size: int, made: torch.dtype) -> CacheKind:
        """`made`: of the activations."""
        return PagedRows(self.layout.dim, block_size, made)

    def store(self, x: Tensor, batch: AttentionBatch, cache: Any) -> None:
        """`cache`: of `cache_kind`."""
        self.ops.store_index_keys(self.keys(x), self.norm, self.layout, self.cos_sin, batch, cache)

    def choose(
        self, x: Tensor, narrow: Tensor, batch: AttentionBatch, cache: Any, block_size: int, *, every: bool
    ) -> Chosen:
        """`narrow`: see `queries`; `every`: see `IndexOps.choose_tokens`."""
        if self.input_norm is not None:
            weight, bias, eps = self.input_norm
            narrow = F.layer_norm(x, (x.shape[1],), weight, bias, eps)
        queries, weights = self.queries(narrow), self.head_weights(x)
        if self.scales is not None:
            queries = self.ops.scale_heads(queries, batch.positions, self.scales)
        return self.ops.choose_tokens(
            queries, weights, self.layout, self.cos_sin, batch, cache, block_size, every=every
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledIndexer(Indexer):
    """One that chooses pools of tokens; see `PooledIndexOps`. Its layout says how many tokens these have together."""

    gates: Linear
    """Scores of the softmax that makes keys of tokens into one of their pool."""
    bias: Tensor
    """float32 [rate, dim]: added to these, by a token's place in its pool."""

    @property
    def weight_bytes(self) -> int:
        return self.head_weights.weight_bytes + self.gates.weight_bytes

    def cache_kind(self, block_size: int, made: torch.dtype) -> CacheKind:
        return pool_keys_kind(self.layout.dim, len(self.bias), block_size, made)

    def store(self, x: Tensor, batch: AttentionBatch, cache: Any) -> None:
        pools, (running,) = cache
        self.ops.store_pools(self.inputs(x), batch, pools, PoolState(running, None))

    def inputs(self, x: Tensor) -> PoolInputs:
        """What pools are made of."""
        keys = F.layer_norm(self.keys(x), (self.layout.dim,), self.norm.weight, self.norm.bias, self.norm.eps)
        return PoolInputs(keys, self.gates(x), self.bias)

    def choose(
        self, x: Tensor, narrow: Tensor, batch: AttentionBatch, cache: Any, block_size: int, *, every: bool
    ) -> Chosen:
        rate, layout = len(self.bias), self.layout
        pooled = PooledIndexLayout(layout.heads, layout.dim, rate, layout.most // rate)
        return self.ops.choose_pools(self.queries(narrow), self.head_weights(x), pooled, batch, cache[0], every=every)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedPoolIndexer(PooledIndexer):
    """The same without a state: what pools are made of is kept of every token."""

    def cache_kind(self, block_size: int, made: torch.dtype) -> CacheKind:
        rate, dim = self.bias.shape
        return BothKinds(PagedEntries(dim, rate, block_size, made), PagedLatent(2 * dim, block_size, torch.float32))

    def store(self, x: Tensor, batch: AttentionBatch, cache: Any) -> None:
        pools, kept = cache
        self.ops.store_paged_pools(self.inputs(x), batch, pools, kept.latents)
