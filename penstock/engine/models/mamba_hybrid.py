"""Mamba-2 layers beside attention, with the forward pass of Llama: Granite 4 and its like."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.backends.interface import MambaLayout, MambaWeights
from penstock.engine.models.architecture import Architecture, LayerContext
from penstock.engine.models.decoder import DecoderLayer
from penstock.engine.models.layers.mamba import Mamba2
from penstock.engine.models.layers.mixer import TokenMixer
from penstock.engine.models.llama import LlamaDecoder, compose_attention, compose_feed_forward


def compose_layer(context: LayerContext) -> DecoderLayer:
    read, names, prefix, config = context.read, context.names, context.prefix, context.config
    recurrent = config.mamba is not None and config.mamba.layers[context.index]
    mixer: TokenMixer = compose_mamba(context) if recurrent else compose_attention(context)
    return DecoderLayer(
        mixer_norm=read.norm(prefix + names.mixer_norm, config.hidden_size),
        mixer=mixer,
        feed_forward_norm=read.norm(prefix + names.feed_forward_norm, config.hidden_size),
        feed_forward=compose_feed_forward(context),
    )


def compose_mamba(context: LayerContext) -> Mamba2:
    read, config, at = context.read, context.config, context.prefix + context.names.mamba
    mamba, hidden = config.mamba, config.hidden_size
    assert mamba is not None
    shared = mamba.norm_shards > 1
    layout = MambaLayout(
        heads=mamba.heads,
        head_dim=mamba.head_dim,
        groups=mamba.groups,
        state=mamba.state,
        conv=mamba.conv,
        norm_groups=0 if shared else mamba.norm_groups,
        gate_first=mamba.gate_first,
    )

    def numbers(name: str, *shape: int) -> Tensor:
        return read.get(at + name, *shape, dtype=torch.float32)

    conv = numbers("conv1d.weight", layout.channels, 1, layout.conv).reshape(-1, layout.conv)
    weights = MambaWeights(
        conv=conv,
        conv_bias=numbers("conv1d.bias", layout.channels) if mamba.conv_bias else torch.zeros_like(conv[:, 0]),
        decay=-numbers("A_log", layout.heads).exp(),
        dt_bias=numbers("dt_bias", layout.heads),
        skip=numbers("D", layout.heads),
        norm=read.unshifted(f"{at}norm", layout.inner) if mamba.norm_groups else torch.ones_like(conv[:, 0]),
        eps=mamba.norm_eps,
        dt_range=mamba.dt_range,
    )
    return Mamba2(
        ops=read.backend.ops,
        mamba_ops=read.backend.ops,
        in_proj=read.linear(at, {"in_proj": layout.width}, hidden, mamba.proj_bias),
        out_proj=read.linear(at, {"out_proj": hidden}, layout.inner, mamba.proj_bias),
        layout=layout,
        weights=weights,
        dtype=read.dtype,
    )


MAMBA_HYBRID = Architecture(LlamaDecoder, compose_layer)
