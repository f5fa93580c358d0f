"""Kimi Linear: delta nets with a decay for every channel (KDA) in most layers, attention over latents in the others.

The forward pass is Llama's.
"""

from __future__ import annotations

import torch

from penstock.engine.backends.interface import DeltaLayout, DeltaWeights
from penstock.engine.models import latent
from penstock.engine.models.architecture import Architecture, LayerContext
from penstock.engine.models.decoder import DecoderLayer
from penstock.engine.models.layers.delta_net import ChannelDeltaNet
from penstock.engine.models.layers.mixer import TokenMixer
from penstock.engine.models.llama import LlamaDecoder, compose_feed_forward

FORGET = "forget_gate."
QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")
CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
CONVOLUTION = "conv1d"
RATE, DECAY_DOWN, GATE_DOWN = "b_proj", f"{FORGET}f_a_proj", "g_a_proj"
DECAY_UP, GATE_UP, OUTPUT = f"{FORGET}f_b_proj", "g_b_proj", "o_proj"


def compose_layer(context: LayerContext) -> DecoderLayer:
    read, names, prefix, config = context.read, context.names, context.prefix, context.config
    return DecoderLayer(
        mixer_norm=read.norm(prefix + names.mixer_norm, config.hidden_size),
        mixer=compose_mixer(context),
        feed_forward_norm=read.norm(prefix + names.feed_forward_norm, config.hidden_size),
        feed_forward=compose_feed_forward(context),
    )


def compose_mixer(context: LayerContext) -> TokenMixer:
    delta = context.config.delta
    recurrent = delta is not None and delta.layers[context.index]
    return compose_delta_net(context) if recurrent else latent.compose_attention(context)


def compose_delta_net(context: LayerContext) -> ChannelDeltaNet:
    read, config, at = context.read, context.config, context.prefix + context.names.attention
    delta, hidden = config.delta, config.hidden_size
    assert delta is not None
    heads, dim = delta.k_heads, delta.k_dim
    wide = heads * dim
    layout = DeltaLayout(
        heads, heads, dim, dim, delta.conv, grouped=False, by_channel=True, sigmoid_gate=True, lowest=delta.lowest
    )
    mix, gates = dict.fromkeys(QUERY_KEY_VALUE, wide), {RATE: heads, DECAY_DOWN: dim, GATE_DOWN: dim}
    stacked, dense = read.all_dense, read.dense()
    # The reference keeps them in one tensor, in memory.
    stored = dict.fromkeys(CONVOLUTIONS, wide)
    if read.stores(f"{at}{CONVOLUTION}.weight"):
        stored = {CONVOLUTION: 3 * wide}
    conv = [read.get(f"{at}{name}.weight", rows, 1, delta.conv, dtype=torch.float32) for name, rows in stored.items()]
    return ChannelDeltaNet(
        ops=read.backend.ops,
        delta_ops=read.backend.ops,
        mix=read.linear(at, {**mix, **gates} if stacked else mix, hidden),
        gates=None if stacked else dense.linear(at, gates, hidden),
        output=read.linear(at, {OUTPUT: hidden}, wide),
        layout=layout,
        weights=DeltaWeights(
            conv=torch.cat(conv).reshape(-1, delta.conv),
            decay=-read.get(f"{at}{FORGET}A_log", *delta.rate_shape, dtype=torch.float32).view(heads).exp(),
            decay_bias=read.get(f"{at}{FORGET}dt_bias", wide, dtype=torch.float32),
            norm=read.unshifted(f"{at}o_norm", dim),
            eps=config.rms_eps,
        ),
        dtype=read.dtype,
        decay_expand=dense.linear(at, {DECAY_UP: wide}, dim),
        gate_expand=dense.linear(at, {GATE_UP: wide}, dim),
    )


KIMI_LINEAR_LIKE = Architecture(LlamaDecoder, compose_layer)
