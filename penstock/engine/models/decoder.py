"""The decoder: one transformer for every family, told apart by its configuration alone.

Tokens of all sequences are packed along one axis, so a layer never knows whether it sees prompts, decodes or both.
The residual stream is one tensor updated in place; normalization and the residual addition are one operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import ActivationOps, AttentionBatch, HeadLayout, KeySmoothing, KVScales, Ops
from penstock.engine.kv.cache import KVCache, LayerCache
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.layers.linear import FusedLinear, Linear
from penstock.engine.models.layers.mlp import Mlp


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer. Query, key and value are one matrix; the feed-forward is dense or made of experts."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    heads: HeadLayout
    cos_sin: Tensor
    """Rotary table [positions, rotated dimensions], shared with other layers."""
    output: Linear
    mlp_norm: Tensor
    mlp: Mlp
    attention_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None
    """With sandwich norms: what attention and feed-forward give is normalized before it is added."""
    kv_scales: KVScales | None = None
    """With an FP8 cache: what this layer's keys and values are divided by when stored."""
    key_smoothing: KeySmoothing | None = None
    """With an int8 cache: how this layer's keys are smoothed there."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.output, *self.mlp.linears


@dataclass(frozen=True, slots=True)
class Decoder:
    """Embedding, layers, final norm and head."""

    config: ModelConfig
    ops: Ops
    embedding: Tensor
    layers: list[DecoderLayer]
    final_norm: Tensor
    head: Linear
    inner: ActivationOps
    """Norms inside the layers: those of `ops`, or ones that hand FP8 to FP8 linears."""
    fused_up_to: int = 0
    """Steps of at most this many tokens take the fused path; 0 where the layers are not all plain."""

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        """Final hidden states [T, hidden] of the packed tokens; their keys and values are in `kv` afterwards."""
        return self.run(self.embed(token_ids), batch, kv)

    def run(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        """The same from embedded tokens, the residual stream, to which every layer adds in place."""
        if residual.shape[0] <= self.fused_up_to:
            return self._run_fused(residual, batch, kv)
        ops, inner, eps = self.ops, self.inner, self.config.rms_eps
        x = inner.rms_norm(residual, self.layers[0].input_norm, eps, self.embedding.dtype)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            x = layer.output(self._attend(layer, layer.qkv(x), batch, kv.layers[index]))
            x = layer.mlp.ops.add_rms_norm(x, residual, layer.mlp_norm, eps, layer.attention_out_norm)
            x = layer.mlp(x)
            if index < last:
                x = inner.add_rms_norm(x, residual, self.layers[index + 1].input_norm, eps, layer.mlp_out_norm)
        return ops.add_rms_norm(x, residual, self.final_norm, eps, self.layers[last].mlp_out_norm)

    def _run_fused(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        """The same in six launches a layer: norms, gate and residual additions are part of the linears."""
        eps = self.config.rms_eps
        for index, layer in enumerate(self.layers):
            qkv, output, gate_up, down = (cast(FusedLinear, linear) for linear in layer.linears)
            attended = self._attend(layer, qkv.fused(residual, norm=layer.input_norm, eps=eps), batch, kv.layers[index])
            residual = output.fused(attended, residual=residual)
            x = gate_up.fused(residual, norm=layer.mlp_norm, eps=eps, gated=True)
            residual = down.fused(x, residual=residual)
        return self.ops.rms_norm(residual, self.final_norm, eps)

    def embed(self, token_ids: Tensor) -> Tensor:
        """The residual stream as it begins."""
        embedded = F.embedding(token_ids, self.embedding)
        return embedded if self.stream_dtype is embedded.dtype else self.ops.widen(embedded)

    @property
    def stream_dtype(self) -> torch.dtype:
        """Of the residual stream; activations have the embedding's."""
        return torch.float32 if self.ops.wide_stream else self.embedding.dtype

    def _attend(self, layer: DecoderLayer, qkv: Tensor, batch: AttentionBatch, kv: LayerCache) -> Tensor:
        scales = kv.scales or layer.kv_scales
        q = self.ops.rope_and_cache(
            qkv, layer.heads, layer.cos_sin, batch, kv.k, kv.v,
            layer.q_norm, layer.k_norm, self.config.rms_eps, scales, layer.key_smoothing,
        )  # fmt: skip
        return self.ops.attention(q, layer.heads, batch, kv.k, kv.v, scales)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab] of chosen hidden states."""
        return self.head(hidden).float()

    @property
    def max_positions(self) -> int:
        """Positions that the rotary tables reach."""
        return self.layers[0].cos_sin.shape[0]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that steps read (the embedding is a lookup and does not count)."""
        parts = [part for layer in self.layers for part in (layer.qkv, layer.output, layer.mlp)]
        return sum(part.weight_bytes for part in [*parts, self.head])
