"""Gated attention to the blocks of tokens that an indexer chooses (QSA); see `BlockIndexOps`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch, BlockIndex, BlockIndexLayout
from penstock.engine.kv.kinds import BothKinds, CacheKind, PagedEntries, PagedRows
from penstock.engine.models.layers.gated_attention import GatedAttention
from penstock.engine.models.layers.linear import Linear


def with_index_keys(kept: CacheKind, dim: int, rate: int, block_size: int, made: torch.dtype) -> BothKinds:
    """Beside what attention keeps: index keys of tokens and of blocks, in the type of the activations."""
    return BothKinds(kept, BothKinds(PagedRows(dim, block_size, made), PagedEntries(dim, rate, block_size, made)))


@dataclass(frozen=True, slots=True)
class BlockIndexer:
    """Reads what its layer's attention reads."""

    linear: Linear
    """Queries of all heads, then the key."""
    query_norm: Tensor
    key_norm: Tensor
    layout: BlockIndexLayout
    dtype: torch.dtype
    """Of the keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAttention(GatedAttention):
    """See `GatedAttention`."""

    indexer: BlockIndexer

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.indexer.linear, self.output

    @property
    def weight_bytes(self) -> int:
        return sum(linear.weight_bytes for linear in self.linears)

    def cache_kind(self, block_size: int, dtype: torch.dtype) -> BothKinds:
        layout = self.indexer.layout
        own = GatedAttention.cache_kind(self, block_size, dtype)
        return with_index_keys(own, layout.dim, layout.rate, block_size, self.indexer.dtype)

    def forward(self, x: Any, batch: AttentionBatch, cache: Any) -> Tensor:
        """`cache`: of `cache_kind`."""
        ops, heads, indexer, layout = self.attention_ops, self.heads, self.indexer, self.indexer.layout
        kept, (tokens, blocks) = cache
        scales = kept.scales or self.kv_scales
        qkv, gate = ops.split_gate(self.qkv(x), heads)
        q = ops.rope_and_cache(
            qkv, heads, self.cos_sin, batch, kept.k, kept.v, self.q_norm, self.k_norm, self.eps, scales,
            self.key_smoothing,
        )  # fmt: skip
        made = indexer.linear(x)
        queries, keys = made[:, : -layout.dim], made[:, -layout.dim :]
        ops.store_block_keys(keys, indexer.key_norm, layout, self.cos_sin, batch, tokens, blocks)
        index = BlockIndex(queries.contiguous(), indexer.query_norm, layout, blocks)
        seen = ops.attend_blocks(q, heads, index, self.cos_sin, batch, kept.k, kept.v, scales)
        return self.output(ops.sigmoid_mul(seen, gate))
