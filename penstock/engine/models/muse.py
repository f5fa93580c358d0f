"""Muse: norms before and behind attention and feed-forward, of which those behind have an epsilon of their own.

In Muse Spark two gates of a layer weigh the residual stream and what is added to it, channel by channel. They are
numbers of the layer, not of the token: what is added has its weights in the gains of the norm behind it, and the stream
is multiplied by the others before.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch
from penstock.engine.kv.cache import KVCache
from penstock.engine.models import llama
from penstock.engine.models.architecture import Architecture, LayerContext
from penstock.engine.models.decoder import Decoder, DecoderLayer

MIXER_GATE, FEED_FORWARD_GATE = "post_attention_residual_gate.gate", "post_feedforward_residual_gate.gate"
OUT_SCALE = "post_feedforward_layernorm"
"""Of Muse Spark: a norm whose weights its inputs are multiplied by before they are normalized."""
_LEAST = 1e-3
"""Of the square of what the residual stream is multiplied by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedResidualLayer(DecoderLayer):
    """A layer with gates of the residual stream."""

    mixer_kept: Tensor
    feed_forward_kept: Tensor
    """float32 [hidden]: what the stream is multiplied by before attention's or the feed-forward's result is added."""
    out_scale: Tensor
    """float32 [hidden]: what the feed-forward's result is multiplied by before it is normalized."""


@dataclass(frozen=True, slots=True)
class MuseDecoder(Decoder):
    """See `Decoder`."""

    uniform: ClassVar[bool] = True

    def run(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        ops, eps, dtype = self.ops, self.config.rms_eps, self.embedding.dtype
        out_eps = eps if self.config.out_norm_eps is None else self.config.out_norm_eps
        for index, cache in zip(range(len(self.layers)), kv.layers, strict=True):
            layer: Any = self.layers[index]
            gated, mixer, feed_forward = isinstance(layer, GatedResidualLayer), layer.mixer, layer.feed_forward
            x = mixer.forward(mixer.ops.rms_norm(residual, layer.mixer_norm, eps, dtype), batch, cache)
            if gated:
                residual.mul_(layer.mixer_kept)
            # Norms behind have another epsilon than norms before, so that they are two operations.
            ops.add_rms_norm(x, residual, None, out_eps, layer.mixer_out_norm)
            x = feed_forward.forward(feed_forward.ops.rms_norm(residual, layer.feed_forward_norm, eps, dtype))
            if gated:
                residual.mul_(layer.feed_forward_kept)
                x = (x * layer.out_scale).to(dtype)
            ops.add_rms_norm(x, residual, None, out_eps, layer.feed_forward_out_norm)
        hidden: Tensor = ops.rms_norm(residual, self.final_norm, eps, dtype)
        return hidden


def compose_layer(context: LayerContext) -> DecoderLayer:
    read, config, prefix = context.read, context.config, context.prefix
    made, temperature = llama.compose_layer(context), config.residual_temperature
    if temperature is None:
        return made

    def gate(name: str) -> tuple[Tensor, Tensor]:
        """What the stream is multiplied by, and what is added to it."""
        weights = read.get(f"{prefix}{name}", config.hidden_size, dtype=torch.float32) / temperature
        added = torch.sigmoid(weights)
        return torch.sqrt(torch.clamp(torch.sigmoid(-weights) * (1.0 + added), min=_LEAST)), added

    (mixer_kept, mixer_added), (kept, added) = gate(MIXER_GATE), gate(FEED_FORWARD_GATE)
    own = {field.name: getattr(made, field.name) for field in fields(DecoderLayer)}
    return GatedResidualLayer(**{
        **own,
        "mixer_out_norm": mixer_added,
        "mixer_kept": mixer_kept,
        "feed_forward_out_norm": added,
        "feed_forward_kept": kept,
        "out_scale": read.norm(f"{prefix}{OUT_SCALE}", config.hidden_size).float(),
    })  # fmt: skip


MUSE_LIKE = Architecture(MuseDecoder, compose_layer)
