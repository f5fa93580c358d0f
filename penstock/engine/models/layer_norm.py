"""Layers with LayerNorms, one behind the other or side by side: Command-R, Phi, StableLM and those like them.

Command-A+ may have RMS norms, side by side.

Only norms read the residual stream, and a LayerNorm does not see its mean: the stream is kept centred, and the norms
are RMS norms of it. Where they have biases, these are added to what the norms give.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from penstock.engine.backends.interface import ActivationOps, AttentionBatch
from penstock.engine.kv.cache import KVCache
from penstock.engine.models.architecture import Architecture, LayerContext
from penstock.engine.models.decoder import Decoder, DecoderLayer
from penstock.engine.models.llama import compose_attention, compose_feed_forward


@dataclass(frozen=True, slots=True)
class CentredDecoder(Decoder):
    """See `Decoder`. With `config.parallel` attention and feed-forward read the same stream, normalized once or twice,
    and both are added to it."""

    uniform: ClassVar[bool] = True

    def run(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        ops, parallel = self.ops, self.config.parallel
        added: tuple[Any, ...] = ()
        for layer, cache in zip(self.layers, kv.layers, strict=True):
            self._add(residual, *added)
            mixer, feed_forward = layer.mixer, layer.feed_forward
            x = y = self._normed(mixer.ops, residual, layer.mixer_norm, layer.mixer_norm_bias)
            if not parallel:
                self._add(residual, mixer.forward(x, batch, cache))
            # Linears of another kind read another form.
            if not self.config.one_norm or feed_forward.ops != mixer.ops:
                y = self._normed(feed_forward.ops, residual, layer.feed_forward_norm, layer.feed_forward_norm_bias)
            if parallel:
                added = mixer.forward(x, batch, cache), feed_forward.forward(y)
            else:
                added = (feed_forward.forward(y),)
        self._add(residual, *added)
        hidden: Tensor = self._normed(ops, residual, self.final_norm, self.final_norm_bias)
        return hidden

    def _add(self, residual: Tensor, *added: Any) -> None:
        if self.config.layer_norms:
            self.ops.centre(residual, *added)
            return
        for x in added:
            self.ops.add_rms_norm(x, residual, None, self.config.rms_eps)

    def _normed(self, ops: ActivationOps, residual: Tensor, gains: Tensor | None, bias: Tensor | None) -> Any:
        if bias is None:
            return ops.rms_norm(residual, gains, self.config.rms_eps, self.embedding.dtype)
        x: Any = self.ops.rms_norm(residual, gains, self.config.rms_eps, self.embedding.dtype)
        self.ops.add_row(x, bias)
        return x


def compose_layer(context: LayerContext) -> DecoderLayer:
    read, config, names = context.read, context.config, context.names
    gains, bias = read.layer_norm(context.prefix, names.mixer_norm, config.hidden_size, config.norm_bias)
    inner_gains, inner_bias = gains, bias
    if not config.one_norm:
        inner_gains, inner_bias = read.layer_norm(
            context.prefix, names.feed_forward_norm, config.hidden_size, config.norm_bias
        )
    return DecoderLayer(
        mixer_norm=gains,
        mixer=compose_attention(context),
        feed_forward_norm=inner_gains,
        feed_forward=compose_feed_forward(context),
        mixer_norm_bias=bias,
        feed_forward_norm_bias=inner_bias,
    )


CENTRED = Architecture(CentredDecoder, compose_layer)
