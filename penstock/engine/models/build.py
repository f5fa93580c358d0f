"""From a checkpoint to a decoder: names, fusing, checks, placement."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.kernels.interface import HeadLayout, Ops
from penstock.engine.layers.linear import make_linear
from penstock.engine.layers.rotary import cos_sin_table
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder import Decoder, DecoderLayer
from penstock.errors import CheckpointError


class Weights(Protocol):
    """What the builder needs of a checkpoint; see `penstock.engine.loading`."""

    @property
    def config(self) -> dict[str, Any]: ...

    def names(self) -> Collection[str]: ...

    def tensor(self, name: str) -> Tensor: ...


class _Reader:
    """Fetches tensors by name, checks their shape, and puts them where the decoder runs."""

    def __init__(self, weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
        self.weights = weights
        self.names = set(weights.names())
        self.device = device
        self.dtype = dtype

    def get(self, name: str, *shape: int) -> Tensor:
        if name not in self.names:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}; it is incomplete or of another family")
        tensor = self.weights.tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the configuration says {shape}")
        return tensor.to(device=self.device, dtype=self.dtype)

    def optional(self, wanted: bool, name: str, *shape: int) -> Tensor | None:
        return self.get(name, *shape) if wanted else None


def build_decoder(
    weights: Weights,
    config: ModelConfig,
    ops: Ops,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int,
    progress: Callable[[float], None] | None = None,
) -> Decoder:
    """Read every weight once, fuse and pack it. Peak memory is the model plus one layer."""
    read = _Reader(weights, device, dtype)
    prefix = "model." if "model.embed_tokens.weight" in read.names else ""
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = read.get(f"{prefix}embed_tokens.weight", vocab, hidden)
    layers: list[DecoderLayer] = []
    for index in range(config.num_layers):
        layers.append(_layer(read, config, f"{prefix}layers.{index}.", config.windows[index]))
        if progress is not None:
            progress((index + 1) / (config.num_layers + 1))
    final_norm = read.get(f"{prefix}norm.weight", hidden)
    tied = config.tied_embeddings or "lm_head.weight" not in read.names
    head = embedding if tied else read.get("lm_head.weight", vocab, hidden)
    decoder = Decoder(
        config=config,
        ops=ops,
        embedding=embedding,
        layers=layers,
        final_norm=final_norm,
        head=make_linear(head),
        cos_sin=cos_sin_table(config.rope, config.head_dim, max_positions, device),
    )
    if progress is not None:
        progress(1.0)
    return decoder


def _layer(read: _Reader, config: ModelConfig, at: str, window: int | None) -> DecoderLayer:
    hidden, ffn, dim = config.hidden_size, config.ffn_size, config.head_dim
    q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
    attention, mlp = f"{at}self_attn.", f"{at}mlp."
    sizes = {"q": q_size, "k": kv_size, "v": kv_size}
    qkv = torch.cat([read.get(f"{attention}{x}_proj.weight", size, hidden) for x, size in sizes.items()])
    qkv_bias = None
    if config.qkv_bias:
        qkv_bias = torch.cat([read.get(f"{attention}{x}_proj.bias", size) for x, size in sizes.items()])
    gate_up = torch.cat([read.get(f"{mlp}{x}_proj.weight", ffn, hidden) for x in ("gate", "up")])
    gate_up_bias = None
    if config.mlp_bias:
        gate_up_bias = torch.cat([read.get(f"{mlp}{x}_proj.bias", ffn) for x in ("gate", "up")])
    return DecoderLayer(
        input_norm=read.get(f"{at}input_layernorm.weight", hidden),
        qkv=make_linear(qkv, qkv_bias),
        q_norm=read.optional(config.qk_norm, f"{attention}q_norm.weight", dim),
        k_norm=read.optional(config.qk_norm, f"{attention}k_norm.weight", dim),
        output=make_linear(
            read.get(f"{attention}o_proj.weight", hidden, q_size),
            read.optional(config.output_bias, f"{attention}o_proj.bias", hidden),
        ),
        post_norm=read.get(f"{at}post_attention_layernorm.weight", hidden),
        gate_up=make_linear(gate_up, gate_up_bias),
        down=make_linear(
            read.get(f"{mlp}down_proj.weight", hidden, ffn),
            read.optional(config.mlp_bias, f"{mlp}down_proj.bias", hidden),
        ),
        heads=HeadLayout(config.num_heads, config.num_kv_heads, dim, dim**-0.5, window),
    )
