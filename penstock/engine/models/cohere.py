"""Command-R: layers whose attention and feed-forward read the same LayerNorm, and are both added to what it read.

All norms are LayerNorms without bias, so the mean of the residual stream is never seen: the stream is kept centred, and
the norms are RMS norms of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch
from penstock.engine.kv.cache import KVCache
from penstock.engine.models.architecture import Architecture, LayerContext
from penstock.engine.models.decoder import Decoder, DecoderLayer
from penstock.engine.models.llama import compose_attention, compose_feed_forward


@dataclass(frozen=True, slots=True)
class ParallelDecoder(Decoder):
    """See `Decoder`."""

    uniform: ClassVar[bool] = True

    def run(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        ops, eps, dtype = self.ops, self.config.rms_eps, self.embedding.dtype
        added: tuple[Any, ...] = ()
        for layer, cache in zip(self.layers, kv.layers, strict=True):
            ops.centre(residual, *added)
            mixer, feed_forward, norm = layer.mixer, layer.feed_forward, layer.mixer_norm
            x = y = mixer.ops.rms_norm(residual, norm, eps, dtype)
            if feed_forward.ops != mixer.ops:  # linears of another kind read another form
                y = feed_forward.ops.rms_norm(residual, norm, eps, dtype)
            added = mixer.forward(x, batch, cache), feed_forward.forward(y)
        ops.centre(residual, *added)
        return ops.rms_norm(residual, self.final_norm, eps, dtype)


def compose_layer(context: LayerContext) -> DecoderLayer:
    norm = context.read.norm(context.prefix + context.names.mixer_norm, context.config.hidden_size)
    return DecoderLayer(
        mixer_norm=norm,
        mixer=compose_attention(context),
        feed_forward_norm=norm,
        feed_forward=compose_feed_forward(context),
    )


PARALLEL = Architecture(ParallelDecoder, compose_layer)
