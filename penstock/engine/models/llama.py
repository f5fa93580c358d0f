"""Llama and the families like it: pre-norm layers of attention and a gated feed-forward, dense or of experts.

The residual stream is one tensor updated in place; the residual addition and the norm after it are one operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch
from penstock.engine.kv.cache import KVCache
from penstock.engine.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class LlamaDecoder(Decoder):
    """See `Decoder`. Mixers and feed-forwards may be of any kind."""

    def run(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        if residual.shape[0] <= self.fused_up_to:
            return self._run_fused(residual, batch, kv)
        layers, caches, eps = self.layers, kv.layers, self.config.rms_eps
        x = layers[0].mixer.ops.rms_norm(residual, layers[0].mixer_norm, eps, self.embedding.dtype)
        last = len(layers) - 1
        for index, layer in enumerate(layers):
            x = layer.mixer(x, batch, caches[index])
            x = layer.feed_forward.ops.add_rms_norm(x, residual, layer.feed_forward_norm, eps, layer.mixer_out_norm)
            x = layer.feed_forward(x)
            if index < last:
                after = layers[index + 1]
                x = after.mixer.ops.add_rms_norm(x, residual, after.mixer_norm, eps, layer.feed_forward_out_norm)
        return self.ops.add_rms_norm(x, residual, self.final_norm, eps, layers[last].feed_forward_out_norm)

    def _run_fused(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        """The same in six launches a layer: norms, gate and residual additions are part of the linears."""
        caches, eps = kv.layers, self.config.rms_eps
        for index, layer in enumerate(self.layers):
            mixer: Any = layer.mixer
            feed_forward: Any = layer.feed_forward
            residual = mixer.fused(residual, layer.mixer_norm, eps, batch, caches[index])
            residual = feed_forward.fused(residual, layer.feed_forward_norm, eps)
        return self.ops.rms_norm(residual, self.final_norm, eps)
