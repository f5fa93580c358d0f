"""Attention to the blocks of the context that an indexer chooses for every KV head (MSA); see `SparseBlockOps`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch, SparseBlockIndex, SparseBlockLayout
from penstock.engine.kv.kinds import BothKinds, CacheKind, PagedRows
from penstock.engine.models.layers.attention import Attention
from penstock.engine.models.layers.linear import Linear


def with_token_keys(kept: CacheKind, dim: int, block_size: int, made: torch.dtype) -> BothKinds:
    """Beside what attention keeps: an index key of every token, in the type of the activations."""
    return BothKinds(kept, PagedRows(dim, block_size, made))


@dataclass(frozen=True, slots=True)
class TokenIndexer:
    """Reads what its layer's attention reads."""

    linear: Linear
    """Queries of all heads, then the key."""
    query_norm: Tensor
    key_norm: Tensor
    layout: SparseBlockLayout
    dtype: torch.dtype
    """Of the keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseBlockAttention(Attention):
    """See `Attention`."""

    indexer: TokenIndexer

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.indexer.linear, self.output

    @property
    def weight_bytes(self) -> int:
        return sum(linear.weight_bytes for linear in self.linears)

    def cache_kind(self, block_size: int, dtype: torch.dtype) -> BothKinds:
        own = Attention.cache_kind(self, block_size, dtype)
        return with_token_keys(own, self.indexer.layout.dim, block_size, self.indexer.dtype)

    def forward(self, x: Any, batch: AttentionBatch, cache: Any) -> Tensor:
        """`cache`: of `cache_kind`."""
        ops, heads, indexer, layout = self.attention_ops, self.heads, self.indexer, self.indexer.layout
        kept, keys = cache
        scales = kept.scales or self.kv_scales
        q = ops.rope_and_cache(
            self.qkv(x), heads, self.cos_sin, batch, kept.k, kept.v, self.q_norm, self.k_norm, self.eps, scales,
            self.key_smoothing,
        )  # fmt: skip
        made = indexer.linear(x)
        ops.store_token_keys(made[:, -layout.dim :], indexer.key_norm, layout, self.cos_sin, batch, keys)
        queries = made[:, : -layout.dim].contiguous()
        index = SparseBlockIndex(queries, indexer.query_norm, layout, keys)
        return self.output(ops.attend_sparse_blocks(q, heads, index, self.cos_sin, batch, kept.k, kept.v, scales))
