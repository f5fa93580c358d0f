"""From a checkpoint to a decoder: names, fusing, checks, placement."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.kernels.interface import ActivationOps, HeadLayout, KVScales, Ops
from penstock.engine.layers.linear import Linear, make_linear
from penstock.engine.layers.rotary import cos_sin_table
from penstock.engine.loading.fp8 import Fp8Checkpoint
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder import Decoder, DecoderLayer
from penstock.errors import CheckpointError


class Weights(Protocol):
    """What the builder needs of a checkpoint; see `penstock.engine.loading`."""

    @property
    def config(self) -> dict[str, Any]: ...

    def names(self) -> Collection[str]: ...

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor: ...


class Quantizer(Protocol):
    """Makes one linear layer of the named matrices in few bits, or None when it cannot."""

    def __call__(self, weights: Weights, names: dict[str, int], inputs: int, bias: Tensor | None) -> Linear | None: ...


class _Reader:
    """Fetches tensors by name, checks their shape, and puts them where the decoder runs."""

    def __init__(self, weights: Weights, device: torch.device, dtype: torch.dtype, quantize: Quantizer | None) -> None:
        self.weights = weights
        self.names = set(weights.names())
        self.device = device
        self.dtype = dtype
        self.quantize = quantize

    def get(self, name: str, *shape: int) -> Tensor:
        if name not in self.names:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}; it is incomplete or of another family")
        tensor = self.weights.tensor(name, self.device)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the configuration says {shape}")
        return tensor.to(device=self.device, dtype=self.dtype)

    def optional(self, wanted: bool, name: str, *shape: int) -> Tensor | None:
        return self.get(name, *shape) if wanted else None

    def linear(self, at: str, parts: dict[str, int], inputs: int, bias: bool = False) -> Linear:
        """Matrices `at + part` of the given output sizes, stacked into one layer."""
        biases = [self.get(f"{at}{part}.bias", size) for part, size in parts.items()] if bias else None
        stacked_bias = torch.cat(biases) if biases else None
        names = {f"{at}{part}.weight": size for part, size in parts.items()}
        if self.quantize is not None and self.names.issuperset(names):
            quantized = self.quantize(self.weights, names, inputs, stacked_bias)
            if quantized is not None:
                return quantized
        return make_linear(torch.cat([self.get(name, size, inputs) for name, size in names.items()]), stacked_bias)


def build_decoder(
    weights: Weights,
    config: ModelConfig,
    ops: Ops,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int,
    quantize: Quantizer | None = None,
    inner: ActivationOps | None = None,
    fused_up_to: int = 0,
    fp8_cache: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Decoder:
    """Read every weight once, fuse and pack it. Peak memory is the model plus one layer."""
    read = _Reader(weights, device, dtype, quantize)
    prefix = "model." if "model.embed_tokens.weight" in read.names else ""
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = read.get(f"{prefix}embed_tokens.weight", vocab, hidden)
    layers: list[DecoderLayer] = []
    for index in range(config.num_layers):
        at = f"{prefix}layers.{index}."
        scales = _kv_scales(weights, f"{at}self_attn.", config.num_kv_heads, device) if fp8_cache else None
        layers.append(_layer(read, config, at, config.windows[index], scales))
        if progress is not None:
            progress((index + 1) / (config.num_layers + 1))
    final_norm = read.get(f"{prefix}norm.weight", hidden)
    tied = config.tied_embeddings or "lm_head.weight" not in read.names
    head = f"{prefix}embed_tokens" if tied else "lm_head"
    decoder = Decoder(
        config=config,
        ops=ops,
        embedding=embedding,
        layers=layers,
        final_norm=final_norm,
        head=read.linear("", {head: vocab}, hidden),
        cos_sin=cos_sin_table(config.rope, config.head_dim, max_positions, device),
        inner=inner or ops,
        fused_up_to=fused_up_to,
    )
    if progress is not None:
        progress(1.0)
    return decoder


def _layer(read: _Reader, config: ModelConfig, at: str, window: int | None, kv_scales: KVScales | None) -> DecoderLayer:
    hidden, ffn, dim = config.hidden_size, config.ffn_size, config.head_dim
    q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
    attention, mlp = f"{at}self_attn.", f"{at}mlp."
    qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    return DecoderLayer(
        input_norm=read.get(f"{at}input_layernorm.weight", hidden),
        qkv=read.linear(attention, qkv, hidden, config.qkv_bias),
        q_norm=read.optional(config.qk_norm, f"{attention}q_norm.weight", dim),
        k_norm=read.optional(config.qk_norm, f"{attention}k_norm.weight", dim),
        output=read.linear(attention, {"o_proj": hidden}, q_size, config.output_bias),
        post_norm=read.get(f"{at}post_attention_layernorm.weight", hidden),
        gate_up=read.linear(mlp, {"gate_proj": ffn, "up_proj": ffn}, hidden, config.mlp_bias),
        down=read.linear(mlp, {"down_proj": hidden}, ffn, config.mlp_bias),
        heads=HeadLayout(config.num_heads, config.num_kv_heads, dim, dim**-0.5, window),
        kv_scales=kv_scales,
    )


def _kv_scales(weights: Weights, attention: str, kv_heads: int, device: torch.device) -> KVScales:
    """The checkpoint's own scales for an FP8 cache, or 1: e4m3 reaches 448 and keeps three bits at any size."""
    k, v = weights.kv_scale(attention) if isinstance(weights, Fp8Checkpoint) else (1.0, 1.0)
    return torch.full((kv_heads,), k, device=device), torch.full((kv_heads,), v, device=device)
