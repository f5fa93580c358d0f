"""Hunyuan 4: attention over latents of chosen tokens, with gates and sinks, among residual streams that stay apart."""

from __future__ import annotations

from penstock.engine.models.architecture import Architecture, LayerContext
from penstock.engine.models.deepseek_v4 import DeepseekV4Decoder, StreamsLayer, compose_among_streams
from penstock.engine.models.latent import compose_attention


def compose_layer(context: LayerContext) -> StreamsLayer:
    return compose_among_streams(context, compose_attention(context))


HY_V4_LIKE = Architecture(DeepseekV4Decoder, compose_layer)
