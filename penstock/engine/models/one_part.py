"""Layers that are one part each: a mixer (Mamba-2 or attention) or a feed-forward, with one norm before it.

Mamba-2 has mixers alone, Nemotron-H has all three. In a layer the other part is nothing: it has no matrices, needs no
cache, and is never called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from penstock.engine.backends.interface import ActivationOps, AttentionBatch
from penstock.engine.kv.cache import KVCache
from penstock.engine.models.architecture import Architecture, LayerContext
from penstock.engine.models.decoder import Decoder, DecoderLayer
from penstock.engine.models.layers.absent import NoFeedForward, NoMixer
from penstock.engine.models.llama import compose_feed_forward
from penstock.engine.models.mamba_hybrid import compose_mixer


@dataclass(frozen=True, slots=True)
class OnePartDecoder(Decoder):
    """See `Decoder`."""

    uniform: ClassVar[bool] = True

    def run(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        eps = self.config.rms_eps
        x: Any = None
        for layer, cache in zip(self.layers, kv.layers, strict=True):
            ops, norm, forward = _part(layer, batch, cache)
            if x is None:
                x = ops.rms_norm(residual, norm, eps, self.embedding.dtype)
            else:
                x = ops.add_rms_norm(x, residual, norm, eps)
            x = forward(x)
        return self.ops.add_rms_norm(x, residual, self.final_norm, eps)


def _part(
    layer: DecoderLayer, batch: AttentionBatch, cache: Any
) -> tuple[ActivationOps, Tensor | None, Callable[[Any], Any]]:
    if isinstance(layer.mixer, NoMixer):
        return layer.feed_forward.ops, layer.feed_forward_norm, layer.feed_forward.forward
    return layer.mixer.ops, layer.mixer_norm, lambda x: layer.mixer.forward(x, batch, cache)


def compose_layer(context: LayerContext) -> DecoderLayer:
    read, names, config = context.read, context.names, context.config
    norm, ops = read.norm(context.prefix + names.mixer_norm, config.hidden_size), read.backend.ops
    if config.only[context.index] == "mixer":
        return DecoderLayer(norm, compose_mixer(context), None, NoFeedForward(ops))
    return DecoderLayer(None, NoMixer(ops), norm, compose_feed_forward(context))


ONE_PART = Architecture(OnePartDecoder, compose_layer)
