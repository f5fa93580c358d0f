"""From a checkpoint to a decoder: names, fusing, checks, placement."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.backends.interface import ActivationOps, Backend, HeadLayout, KVScales, Ops
from penstock.engine.loading.fp8 import Fp8Checkpoint
from penstock.engine.models.decoder import Decoder, DecoderLayer
from penstock.engine.models.layers.attention import Attention
from penstock.engine.models.layers.experts import ExpertMlp, Router
from penstock.engine.models.layers.feed_forward import FeedForward, GatedMlp
from penstock.engine.models.layers.linear import Linear, SoftCapped
from penstock.engine.models.layers.rotary import cos_sin_table
from penstock.engine.models.llama import LlamaDecoder
from penstock.engine.models.model_config import ModelConfig
from penstock.errors import CheckpointError

_PREFIXES = ("model.", "", "language_model.model.", "model.language_model.")
"""What stands before the decoder's tensor names: usual, headless, and inside a model that also sees."""
_DENSE = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL = ("w1", "w3", "w2")


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

    def __init__(self, weights: Weights, backend: Backend, dtype: torch.dtype, quantize: Quantizer | None) -> None:
        self.weights = weights
        self.names = set(weights.names())
        self.backend = backend
        self.device = backend.device
        self.dtype = dtype
        self.quantize = quantize

    def widened(self) -> _Reader:
        """The same, making dense layers only."""
        return _Reader(self.weights, self.backend, self.dtype, None)

    def get(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        if name not in self.names:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}; it is incomplete or of another family")
        tensor = self.weights.tensor(name, self.device)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the configuration says {shape}")
        return tensor.to(device=self.device, dtype=dtype or self.dtype)

    def zeros(self, *shape: int) -> Tensor:
        """In place of what this process never uses, so that warming up needs no special case."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def norm(self, name: str, size: int, shift: float) -> Tensor:
        """Norm weights; shifted ones stay float32, since one plus a small number would lose its digits."""
        return self.get(name, size, dtype=torch.float32) + shift if shift else self.get(name, size)

    def linear(self, at: str, parts: dict[str, int], inputs: int, bias: bool = False, fused: str = "") -> Linear:
        """Matrices `at + part` of the given output sizes, stacked into one layer; or `at + fused`, where the checkpoint
        has them stacked already."""
        if fused and f"{at}{fused}.weight" in self.names:
            parts = {fused: sum(parts.values())}
        biases = [self.get(f"{at}{part}.bias", size) for part, size in parts.items()] if bias else None
        stacked_bias = torch.cat(biases) if biases else None
        names = {f"{at}{part}.weight": size for part, size in parts.items()}
        if self.quantize is not None and self.names.issuperset(names):
            quantized = self.quantize(self.weights, names, inputs, stacked_bias)
            if quantized is not None:
                return quantized
        dense = torch.cat([self.get(name, size, inputs) for name, size in names.items()])
        return self.backend.linear(dense, stacked_bias)


def build_decoder(
    weights: Weights,
    config: ModelConfig,
    backend: Backend,
    *,
    dtype: torch.dtype,
    max_positions: int,
    quantize: Quantizer | None = None,
    inner: ActivationOps | None = None,
    fused_up_to: int = 0,
    fp8_cache: bool = False,
    head_rows: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Decoder:
    """Read every weight once, fuse and pack it. Peak memory is the model plus one layer.

    `head_rows`: how many of the head's rows this process has, when it is one of several; with none it has no embedding
    either.
    """
    ops, device = backend.ops, backend.device
    read = _Reader(weights, backend, dtype, quantize)
    prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in read.names), "model.")
    hidden, vocab, shift = config.hidden_size, config.vocab_size, config.norm_offset
    ends = head_rows != 0
    embedding = read.get(f"{prefix}embed_tokens.weight", vocab, hidden) if ends else read.zeros(1, hidden)
    if config.embedding_scale != 1.0:
        embedding = embedding * config.embedding_scale
    ropes = {rope: cos_sin_table(rope, config.head_dim, max_positions, device) for rope in config.ropes}
    layers: list[DecoderLayer] = []
    for index in range(config.num_layers):
        at = f"{prefix}layers.{index}."
        scales = _kv_scales(weights, f"{at}self_attn.", config.num_kv_heads, device) if fp8_cache else None
        mlp = _mlp(read, config, at, index, inner or ops)
        layers.append(_layer(read, config, at, index, ropes[config.ropes[index]], mlp, scales, ops, inner or ops))
        if progress is not None:
            progress((index + 1) / (config.num_layers + 1))
    heads = [name for name in ("lm_head", "language_model.lm_head") if f"{name}.weight" in read.names]
    tied = config.tied_embeddings or not heads
    rows = {f"{prefix}embed_tokens" if tied else heads[0]: head_rows or vocab}
    head = read.linear("", rows, hidden) if ends else backend.linear(read.zeros(16, hidden))
    head = backend.as_head(head)
    decoder = LlamaDecoder(
        config=config,
        ops=ops,
        embedding=embedding,
        layers=layers,
        final_norm=read.norm(f"{prefix}norm.weight", hidden, shift),
        head=head if config.logit_softcap is None else SoftCapped(head, config.logit_softcap),
        max_positions=max_positions,
        fused_up_to=fused_up_to if config.plain_layers else 0,
    )
    if progress is not None:
        progress(1.0)
    return decoder


def _layer(
    read: _Reader,
    config: ModelConfig,
    at: str,
    index: int,
    cos_sin: Tensor,
    feed_forward: FeedForward,
    kv_scales: KVScales | None,
    ops: Ops,
    inner: ActivationOps,
) -> DecoderLayer:
    hidden, dim, shift = config.hidden_size, config.head_dim, config.norm_offset
    q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
    attention = f"{at}self_attn."
    qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    before_mlp, after_attention, after_mlp = (
        ("pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
        if config.sandwich_norms
        else ("post_attention_layernorm", "", "")
    )

    def norm(name: str, size: int) -> Tensor:
        return read.norm(f"{name}.weight", size, shift)

    mixer = Attention(
        ops=inner,
        attention_ops=ops,
        qkv=read.linear(attention, qkv, hidden, config.qkv_bias, fused="qkv_proj"),
        output=read.linear(attention, {"o_proj": hidden}, q_size, config.output_bias),
        heads=HeadLayout(
            config.num_heads,
            config.num_kv_heads,
            dim,
            config.attention_scale,
            config.windows[index],
            config.attention_softcap,
        ),
        cos_sin=cos_sin,
        q_norm=norm(f"{attention}q_norm", dim) if config.qk_norm else None,
        k_norm=norm(f"{attention}k_norm", dim) if config.qk_norm else None,
        eps=config.rms_eps,
        kv_scales=kv_scales,
    )
    return DecoderLayer(
        mixer_norm=norm(f"{at}input_layernorm", hidden),
        mixer=mixer,
        feed_forward_norm=norm(f"{at}{before_mlp}", hidden),
        feed_forward=feed_forward,
        mixer_out_norm=norm(f"{at}{after_attention}", hidden) if after_attention else None,
        feed_forward_out_norm=norm(f"{at}{after_mlp}", hidden) if after_mlp else None,
    )


def _mlp(read: _Reader, config: ModelConfig, at: str, index: int, inner: ActivationOps) -> FeedForward:
    hidden, moe, backend = config.hidden_size, config.moe, read.backend
    if moe is None or not moe.layers[index]:
        return _gated(read, config, f"{at}mlp.", _DENSE, config.ffn_size, inner)
    block, names = (f"{at}block_sparse_moe.", _MIXTRAL) if config.family == "mixtral" else (f"{at}mlp.", _DENSE)
    router = Router(backend.linear(read.get(f"{block}gate.weight", moe.experts, hidden)), moe.top_k, moe.normalize)

    def experts(reader: _Reader) -> ExpertMlp:
        parts = (f"{block}experts.{expert}." for expert in range(moe.experts))
        found = (_gated(reader, config, part, names, moe.ffn_size, backend.ops) for part in parts)
        return ExpertMlp(backend.ops, router, tuple(found))

    return backend.experts(lambda: experts(read), lambda: experts(read.widened()))


def _gated(
    read: _Reader, config: ModelConfig, at: str, names: tuple[str, str, str], ffn: int, ops: ActivationOps
) -> GatedMlp:
    gate, up, down = names
    return GatedMlp(
        ops=ops,
        activation=config.activation,
        gate_up=read.linear(at, {gate: ffn, up: ffn}, config.hidden_size, config.mlp_bias, fused="gate_up_proj"),
        down=read.linear(at, {down: config.hidden_size}, ffn, config.mlp_bias),
    )


def _kv_scales(weights: Weights, attention: str, kv_heads: int, device: torch.device) -> KVScales:
    """The checkpoint's own scales for an FP8 cache, or 1: e4m3 reaches 448 and keeps three bits at any size."""
    k, v = weights.kv_scale(attention) if isinstance(weights, Fp8Checkpoint) else (1.0, 1.0)
    return torch.full((kv_heads,), k, device=device), torch.full((kv_heads,), v, device=device)
