"""GLM-5-Next: delta nets with a decay for every channel, and attention over latents of chosen tokens, among several
residual streams."""

from __future__ import annotations

from penstock.engine.models.architecture import Architecture, LayerContext
from penstock.engine.models.deepseek_v4 import DeepseekV4Decoder, StreamsLayer, compose_among_streams
from penstock.engine.models.kimi_linear import compose_mixer


def compose_layer(context: LayerContext) -> StreamsLayer:
    return compose_among_streams(context, compose_mixer(context))


GLM5_NEXT_LIKE = Architecture(DeepseekV4Decoder, compose_layer)
