"""Mamba-2 layers in place of attention, or with it in one layer; with the forward pass of Llama."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.backends.interface import MambaLayout, MambaWeights
from penstock.engine.models.architecture import Architecture, LayerContext
from penstock.engine.models.decoder import DecoderLayer
from penstock.engine.models.layers.mamba import Mamba2
from penstock.engine.models.layers.mixer import TokenMixer
from penstock.engine.models.layers.side_by_side import SideBySide
from penstock.engine.models.llama import LlamaDecoder, compose_attention, compose_feed_forward


def compose_layer(context: LayerContext) -> DecoderLayer:
    read, names, prefix, config = context.read, context.names, context.prefix, context.config
    return DecoderLayer(
        mixer_norm=read.norm(prefix + names.mixer_norm, config.hidden_size),
        mixer=compose_mixer(context),
        feed_forward_norm=read.norm(prefix + names.feed_forward_norm, config.hidden_size),
        feed_forward=compose_feed_forward(context),
    )


def compose_mixer(context: LayerContext) -> TokenMixer:
    mamba = context.config.mamba
    if mamba is None or not mamba.layers[context.index]:
        return compose_attention(context)
    if mamba.beside is None:
        return compose_mamba(context)
    return SideBySide(
        ops=context.read.backend.ops,
        attention=compose_attention(context),
        mamba=compose_mamba(context),
        scales=mamba.beside,
    )


def compose_mamba(context: LayerContext) -> Mamba2:
    read, config, at = context.read, context.config, context.prefix + context.names.mamba
    mamba, hidden = config.mamba, config.hidden_size
    assert mamba is not None
    layout = MambaLayout(
        heads=mamba.heads,
        head_dim=mamba.head_dim,
        groups=mamba.groups,
        state=mamba.state,
        conv=mamba.conv,
        norm_groups=0 if mamba.norm_shards > 1 else mamba.norm_groups,
        gate_first=mamba.gate_first,
    )

    def numbers(name: str, *shape: int) -> Tensor:
        return read.get(at + name, *shape, dtype=torch.float32)

    gate_scale, *channel_scales, dt_scale = mamba.scales
    conv = numbers("conv1d.weight", layout.channels, 1, layout.conv).reshape(-1, layout.conv)
    if channel_scales != [1.0, 1.0, 1.0]:  # the convolution is linear: its weights can have the factors of its inputs
        shared = layout.groups * layout.state
        parts = torch.split(conv, [layout.inner, shared, shared])
        conv = torch.cat([part * factor for part, factor in zip(parts, channel_scales, strict=True)])
    weights = MambaWeights(
        conv=conv,
        conv_bias=numbers("conv1d.bias", layout.channels) if mamba.conv_bias else torch.zeros_like(conv[:, 0]),
        decay=-numbers("A_log", layout.heads).exp(),
        dt_bias=numbers("dt_bias", layout.heads),
        skip=numbers("D", layout.heads),
        norm=read.unshifted(f"{at}norm", layout.inner) if mamba.norm_groups else torch.ones_like(conv[:, 0]),
        eps=mamba.norm_eps,
        dt_range=mamba.dt_range,
        gate_scale=gate_scale,
        dt_scale=dt_scale,
    )
    return Mamba2(
        ops=read.backend.ops,
        mamba_ops=read.backend.ops,
        in_proj=read.linear(at, {"in_proj": layout.width}, hidden, mamba.in_bias),
        out_proj=read.linear(at, {"out_proj": hidden}, layout.inner, mamba.out_bias),
        layout=layout,
        weights=weights,
        dtype=read.dtype,
    )


MAMBA_HYBRID = Architecture(LlamaDecoder, compose_layer)
