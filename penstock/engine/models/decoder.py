"""The decoder: one transformer for every family, told apart by its configuration alone.

Tokens of all sequences are packed along one axis, so a layer never knows whether it sees prompts, decodes or both.
The residual stream is one tensor updated in place; normalization and the residual addition are one operation.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from penstock.engine.kernels.interface import AttentionBatch, HeadLayout, Ops
from penstock.engine.layers.linear import Linear
from penstock.engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer. Query, key and value are one matrix; so are gate and up."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    heads: HeadLayout


@dataclass(frozen=True, slots=True)
class Decoder:
    """Embedding, layers, final norm and head."""

    config: ModelConfig
    ops: Ops
    embedding: Tensor
    layers: list[DecoderLayer]
    final_norm: Tensor
    head: Linear
    cos_sin: Tensor

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: Tensor) -> Tensor:
        """Final hidden states [T, hidden] of the packed tokens; their keys and values are in `kv` afterwards.

        `kv` is [layers, 2, num_blocks, kv_heads, block_size, head_dim].
        """
        ops, eps, cos_sin = self.ops, self.config.rms_eps, self.cos_sin
        residual = F.embedding(token_ids, self.embedding)
        x = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            k_cache, v_cache = kv[index, 0], kv[index, 1]
            qkv = layer.qkv(x)
            q = ops.rope_and_cache(qkv, layer.heads, cos_sin, batch, k_cache, v_cache, layer.q_norm, layer.k_norm, eps)
            x = layer.output(ops.attention(q, layer.heads, batch, k_cache, v_cache))
            x = ops.add_rms_norm(x, residual, layer.post_norm, eps)
            x = layer.down(ops.silu_mul(layer.gate_up(x)))
            norm = self.layers[index + 1].input_norm if index < last else self.final_norm
            x = ops.add_rms_norm(x, residual, norm, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab] of chosen hidden states."""
        return self.head(hidden).float()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one step reads (the embedding is a lookup and does not count)."""
        linears = [m for layer in self.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return sum(linear.weight_bytes for linear in [*linears, self.head])
