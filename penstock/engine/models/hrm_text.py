"""HRM-Text: two stacks of layers that run in turn, several times for each token.

A run of the lower stack reads its own last result and that of the upper one; after some of these the upper stack reads
both. Every run has keys and values of its own: `layers` has each layer once for every run that it is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch
from penstock.engine.kv.cache import KVCache
from penstock.engine.models.architecture import Architecture, LayerContext
from penstock.engine.models.decoder import Decoder, DecoderLayer
from penstock.engine.models.llama import compose_attention, compose_feed_forward
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.weights import WeightReader

STACKS, BEGINNING = ("L_module", "H_module"), "z_L_init"
"""The lower stack and the upper one; see `CyclesConfig.layer_of`."""


@dataclass(frozen=True, slots=True)
class HrmTextDecoder(Decoder):
    """See `Decoder`."""

    beginning: Tensor | None = None
    """float32 [hidden]: what the first run of the lower stack reads as its own last result."""

    @property
    def launched_eagerly(self) -> bool:
        return True  # what stacks read is added up in between

    def alone(self, layer: DecoderLayer) -> HrmTextDecoder:
        assert self.config.cycles is not None
        once = replace(self.config, cycles=replace(self.config.cycles, layers=1, lower=1, upper=1))
        return replace(self, config=once, layers=[layer, layer])

    def run(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        cycles, eps = self.config.cycles, self.config.rms_eps
        assert cycles is not None and self.beginning is not None
        upper, lower = residual, self.beginning.to(residual.dtype).expand_as(residual)
        at = 0
        for _ in range(cycles.upper):
            for _ in range(cycles.lower):
                lower = self._stack(lower + upper, at, batch, kv)
                at += cycles.layers
            upper = self._stack(upper + lower, at, batch, kv)
            at += cycles.layers
        return self.ops.rms_norm(upper, None, eps, self.embedding.dtype)

    def _stack(self, stream: Tensor, begin: int, batch: AttentionBatch, kv: KVCache) -> Tensor:
        """A run of the layers from `begin` on."""
        cycles, ops, eps, dtype = self.config.cycles, self.ops, self.config.rms_eps, self.embedding.dtype
        assert cycles is not None
        for at in range(begin, begin + cycles.layers):
            layer = self.layers[at]
            mixer, feed_forward = layer.mixer, layer.feed_forward
            x = mixer.forward(mixer.ops.rms_norm(stream, layer.mixer_norm, eps, dtype), batch, kv.layers[at])
            x = feed_forward.forward(feed_forward.ops.add_rms_norm(x, stream, layer.feed_forward_norm, eps))
            ops.add_rms_norm(x, stream, None, eps)
        return ops.rms_norm(stream, self.final_norm, eps, stream.dtype)


def compose_layer(context: LayerContext) -> DecoderLayer:
    cycles, root = context.config.cycles, context.prefix.removesuffix(f"layers.{context.index}.")
    assert cycles is not None
    stack, layer = divmod(cycles.layer_of(context.index), cycles.layers)
    own = replace(context, index=layer, prefix=f"{root}{STACKS[stack]}.layers.{layer}.")
    made: dict[str, Any] = context.read.made
    if own.prefix not in made:
        ones = context.read.ones(context.config.hidden_size)
        made[own.prefix] = DecoderLayer(
            mixer_norm=ones,
            mixer=compose_attention(own),
            feed_forward_norm=ones,
            feed_forward=compose_feed_forward(own),
        )
    found: DecoderLayer = made[own.prefix]
    return found


def _further(read: WeightReader, config: ModelConfig, prefix: str) -> Mapping[str, Any]:
    return {"beginning": read.get(f"{prefix}{BEGINNING}", config.hidden_size, dtype=torch.float32)}


HRM_TEXT_LIKE = Architecture(HrmTextDecoder, compose_layer, _further)
