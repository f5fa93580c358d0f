"""Qwen3-Next and its successors: gated delta nets in most layers, gated attention in the others.

The forward pass is Llama's. Qwen3-Next stores the projections of a delta net by key head, Qwen3.5 all queries, all
keys, all values, all output gates; both run as they are stored.
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.engine.backends.interface import DeltaLayout, DeltaWeights, HeadLayout
from penstock.engine.models.architecture import Architecture, LayerContext
from penstock.engine.models.decoder import DecoderLayer
from penstock.engine.models.layers.delta_net import GatedDeltaNet
from penstock.engine.models.layers.gated_attention import GatedAttention
from penstock.engine.models.layers.mixer import TokenMixer
from penstock.engine.models.llama import LlamaDecoder, compose_feed_forward

MIXER = "linear_attn."


def compose_layer(context: LayerContext) -> DecoderLayer:
    read, names, prefix, config = context.read, context.names, context.prefix, context.config
    assert config.delta is not None
    recurrent = config.delta.layers[context.index]
    mixer: TokenMixer = compose_delta_net(context) if recurrent else compose_gated_attention(context)
    return DecoderLayer(
        mixer_norm=read.norm(prefix + names.mixer_norm, config.hidden_size),
        mixer=mixer,
        feed_forward_norm=read.norm(prefix + names.feed_forward_norm, config.hidden_size),
        feed_forward=compose_feed_forward(context),
    )


def compose_gated_attention(context: LayerContext) -> GatedAttention:
    return GatedAttention(**gated_attention_parts(context))


def gated_attention_parts(context: LayerContext) -> dict[str, Any]:
    """The fields of `GatedAttention`."""
    read, config, names, dim = context.read, context.config, context.names, context.config.head_dim
    prefix, hidden = context.prefix + names.attention, config.hidden_size
    q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
    qkv = dict(zip(names.qkv, (2 * q_size, kv_size, kv_size), strict=True))
    return {
        "ops": context.inner,
        "attention_ops": read.backend.ops,
        "qkv": read.linear(prefix, qkv, hidden, config.qkv_bias),
        "output": read.linear(prefix, {names.output: hidden}, q_size, config.output_bias),
        "heads": HeadLayout(config.num_heads, config.num_kv_heads, dim, config.attention_scale),
        "cos_sin": context.cos_sin,
        "q_norm": read.norm(f"{prefix}q_norm", dim),
        "k_norm": read.norm(f"{prefix}k_norm", dim),
        "eps": config.rms_eps,
        "kv_scales": read.kv_scales(prefix, config.num_kv_heads) if context.fp8_cache else None,
    }


def compose_delta_net(context: LayerContext) -> GatedDeltaNet:
    read, config, at = context.read, context.config, context.prefix + MIXER
    delta, hidden = config.delta, config.hidden_size
    assert delta is not None
    # Qwen3-Next's GGUF files have the projections apart.
    grouped = delta.grouped and not read.stores(f"{at}in_proj_qkv.weight")
    layout = DeltaLayout(
        delta.k_heads, delta.v_heads, delta.k_dim, delta.v_dim, delta.conv, grouped, sigmoid_gate=delta.sigmoid_gate
    )
    values, heads = delta.v_heads * delta.v_dim, delta.v_heads
    if grouped:
        mix, gates = {"in_proj_qkvz": layout.width}, {"in_proj_ba": 2 * heads}
    else:
        mix = {"in_proj_qkv": layout.channels, "in_proj_z": values}
        gates = {"in_proj_b": heads, "in_proj_a": heads}
    stacked = read.all_dense
    conv = read.get(f"{at}conv1d.weight", layout.channels, 1, delta.conv, dtype=torch.float32)
    weights = DeltaWeights(
        conv=conv.reshape(-1, delta.conv),
        decay=-read.get(f"{at}A_log", heads, dtype=torch.float32).exp(),
        decay_bias=read.get(f"{at}dt_bias", heads, dtype=torch.float32),
        norm=read.unshifted(f"{at}norm", delta.v_dim),
        eps=config.rms_eps,
    )
    return GatedDeltaNet(
        ops=read.backend.ops,
        delta_ops=read.backend.ops,
        mix=read.linear(at, {**mix, **gates} if stacked else mix, hidden),
        gates=None if stacked else read.dense().linear(at, gates, hidden),
        output=read.linear(at, {"out_proj": hidden}, values),
        layout=layout,
        weights=weights,
        dtype=read.dtype,
    )


QWEN3_NEXT_LIKE = Architecture(LlamaDecoder, compose_layer)
