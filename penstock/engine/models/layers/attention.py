"""Softmax attention over paged keys and values: MHA, GQA and MQA, with RoPE, sliding windows and score caps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import (
    ActivationOps,
    AttentionBatch,
    Clip,
    HeadLayout,
    KeySmoothing,
    KVScales,
    Ops,
    OverRanks,
)
from penstock.engine.kv.kinds import CacheKind, OfLayer, PagedKV, PagedKVCache
from penstock.engine.models.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class RowNorms:
    """Norms of all queries of a token together, and of all its keys: those of the heads that are here."""

    q: Tensor
    k: Tensor
    over_ranks: OverRanks | None = None
    """Where other ranks have the other heads; see `Ops.norm_rows`."""


@dataclass(frozen=True, slots=True)
class HeadLayerNorms:
    """LayerNorms with biases of each head of queries and of keys: gains, then biases, [head_dim] each and float32."""

    q: tuple[Tensor, Tensor]
    k: tuple[Tensor, Tensor]

    def apply(self, qkv: Tensor, layout: HeadLayout, eps: float) -> Tensor:
        dim = layout.head_dim
        heads = qkv.view(len(qkv), -1, dim)
        q, k, values = torch.tensor_split(heads, (layout.heads, layout.heads + layout.kv_heads), 1)
        normed = (F.layer_norm(x.float(), (dim,), *of, eps) for x, of in ((q, self.q), (k, self.k)))
        return torch.cat((*(x.to(qkv.dtype) for x in normed), values), dim=1).view(qkv.shape)


@dataclass(frozen=True, slots=True)
class Attention:
    """See `TokenMixer`. Query, key and value are one matrix."""

    ops: ActivationOps
    attention_ops: Ops
    qkv: Linear
    output: Linear
    heads: HeadLayout
    cos_sin: Tensor
    """Rotary table [positions, rotated dimensions], shared with other layers."""
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    row_norms: RowNorms | None = None
    """Instead of those of heads."""
    eps: float = 0.0
    """Of these norms."""
    kv_scales: KVScales | None = None
    """With an FP8 cache: what this layer's keys and values are divided by when stored."""
    key_smoothing: KeySmoothing | None = None
    """With an int8 cache: how this layer's keys are smoothed there."""
    query_scales: Tensor | None = None
    """float32 [positions]: what queries are multiplied by, after the rotation."""
    query_gains: Tensor | None = None
    """float32 [head_dim]: what queries are multiplied by, after the rotation. Where norms of heads stand behind it:
    their gains and those of keys, which are stored without. A rotation does not change a head's length, so that the
    norms themselves may stand before it."""
    head_norms: HeadLayerNorms | None = None
    """Norms of heads that have biases."""
    clip: Clip | None = None
    """Of queries, keys and values, behind the norms of whole rows."""
    sinks: Tensor | None = None
    """float32 [heads]: a score of each head that takes part in the softmax and stands for no key."""
    source: int | None = None
    """The layer whose keys and values it attends to, where it has none of its own; it is called with that layer's
    cache."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.output

    @property
    def weight_bytes(self) -> int:
        return self.qkv.weight_bytes + self.output.weight_bytes

    def cache_kind(self, block_size: int, dtype: torch.dtype) -> CacheKind:
        if self.source is not None:
            return OfLayer(self.source)
        return PagedKV(self.heads.kv_heads, self.heads.head_dim, block_size, dtype)

    def forward(self, x: Any, batch: AttentionBatch, cache: PagedKVCache) -> Tensor:
        # `attend`, written out: steps that are neither recorded nor fused pay for every call.
        ops, heads, k, v = self.attention_ops, self.heads, cache.k, cache.v
        scales = cache.scales or self.kv_scales
        qkv = self.qkv(x)
        if self.row_norms is not None:
            qkv = self._normed(qkv)
        if self.head_norms is not None:
            qkv = self.head_norms.apply(qkv, self.heads, self.eps)
        if self.clip is not None:
            qkv = ops.pointwise(qkv, self.clip)
        q = ops.rope_and_cache(
            qkv, heads, self.cos_sin, batch, k, v, self.q_norm, self.k_norm, self.eps, scales,
            self.key_smoothing,
        )  # fmt: skip
        if self.query_scales is not None or self.query_gains is not None:
            q = self._grown(q, batch)
        return self.output(ops.attention(q, heads, batch, k, v, scales, self.sinks))

    def fused(self, residual: Tensor, norm: Tensor, eps: float, batch: AttentionBatch, cache: PagedKVCache) -> Tensor:
        """See `FusedMixer`; for linears that are `FusedLinear`."""
        qkv: Any = self.qkv
        output: Any = self.output
        attended = self.attend(qkv.fused(residual, norm=norm, eps=eps), batch, cache)
        out: Tensor = output.fused(attended, residual=residual)
        return out

    def attend(self, qkv: Tensor, batch: AttentionBatch, cache: PagedKVCache) -> Tensor:
        """What lies between its two linears."""
        ops, heads, k, v = self.attention_ops, self.heads, cache.k, cache.v
        scales = cache.scales or self.kv_scales
        if self.row_norms is not None:
            qkv = self._normed(qkv)
        if self.head_norms is not None:
            qkv = self.head_norms.apply(qkv, self.heads, self.eps)
        if self.clip is not None:
            qkv = ops.pointwise(qkv, self.clip)
        q = ops.rope_and_cache(
            qkv, heads, self.cos_sin, batch, k, v, self.q_norm, self.k_norm, self.eps, scales, self.key_smoothing
        )
        if self.query_scales is not None or self.query_gains is not None:
            q = self._grown(q, batch)
        return ops.attention(q, heads, batch, k, v, scales, self.sinks)

    def _grown(self, q: Tensor, batch: AttentionBatch) -> Tensor:
        grown = q if self.query_gains is None else q * self.query_gains
        if self.query_scales is not None:
            grown = grown * self.query_scales[batch.positions].view(-1, 1, 1)
        return grown.to(q.dtype)

    def _normed(self, qkv: Tensor) -> Tensor:
        norms = self.row_norms
        assert norms is not None
        return self.attention_ops.norm_rows(qkv, self.heads, norms.q, norms.k, self.eps, norms.over_ranks)
