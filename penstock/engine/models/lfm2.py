"""LFM2: gated short convolutions in most layers, attention in the others; with the forward pass of Llama."""

from __future__ import annotations

import torch

from penstock.engine.backends.interface import ShortConvWeights
from penstock.engine.models.architecture import Architecture, LayerContext
from penstock.engine.models.decoder import DecoderLayer
from penstock.engine.models.layers.mixer import TokenMixer
from penstock.engine.models.layers.short_conv import ShortConv
from penstock.engine.models.llama import LlamaDecoder, compose_attention, compose_feed_forward


def compose_layer(context: LayerContext) -> DecoderLayer:
    read, names, prefix, config = context.read, context.names, context.prefix, context.config
    short = config.short_conv
    recurrent = short is not None and short.layers[context.index]
    mixer: TokenMixer = compose_short_conv(context) if recurrent else compose_attention(context)
    return DecoderLayer(
        mixer_norm=read.norm(prefix + names.mixer_norm, config.hidden_size),
        mixer=mixer,
        feed_forward_norm=read.norm(prefix + names.feed_forward_norm, config.hidden_size),
        feed_forward=compose_feed_forward(context),
    )


def compose_short_conv(context: LayerContext) -> ShortConv:
    read, at, hidden = context.read, context.prefix + context.names.short_conv, context.config.hidden_size
    short = context.config.short_conv
    assert short is not None
    channels, width = short.channels, short.width
    conv = read.get(f"{at}conv.weight", channels, 1, width, dtype=torch.float32)
    taps = conv.reshape(channels, width).t().contiguous()
    bias = read.get(f"{at}conv.bias", channels, dtype=torch.float32) if short.bias else torch.zeros_like(taps[0])
    return ShortConv(
        ops=read.backend.ops,
        conv_ops=read.backend.ops,
        in_proj=read.linear(at, {"in_proj": 3 * channels}, hidden, short.bias),
        out_proj=read.linear(at, {"out_proj": hidden}, channels, short.bias),
        weights=ShortConvWeights(taps, bias),
        dtype=read.dtype,
    )


LFM2_LIKE = Architecture(LlamaDecoder, compose_layer)
