"""A checkpoint made of random numbers, for measuring speed without a download.

Any configuration works: shapes follow from it, weights are made on the device that will use them. Every tensor is
a stretch of one pool of random numbers, because drawing billions of them would take longer than the benchmark.
The same seed gives the same tensor whatever was asked for before.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError

POOL = 4_194_301
"""Numbers in the pool: a prime, so that rows of no usual length repeat."""


class RandomCheckpoint:
    """Weights that keep activations in range: norms are one, matrices are scaled by their fan-in."""

    def __init__(
        self,
        config: dict[str, Any],
        seed: int = 0,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        embedding_scale: float = 0.02,
    ) -> None:
        """`embedding_scale`: spread of the embeddings. Layers add about one each to what they read; where embeddings
        are a thousand times that, what comes next depends on the last token alone, and no rounding changes it."""
        self.embedding_scale = embedding_scale
        self.config = config
        self.seed = seed
        self.device = device
        self.dtype = dtype
        self.shapes = tensor_shapes(config)
        self._pools: dict[torch.device, Tensor] = {}

    def names(self) -> Collection[str]:
        return self.shapes.keys()

    def tensor(self, name: str, device: str | torch.device | None = None) -> Tensor:
        shape = self.shapes.get(name)
        if shape is None:
            raise CheckpointError(f"a {self.config.get('model_type')} model has no tensor {name!r}")
        where = torch.device(self.device if device is None else device)
        if name.endswith("norm.weight"):
            shifted = str(self.config.get("model_type")).startswith("gemma")
            return torch.full(shape, 0.0 if shifted else 1.0, dtype=self.dtype, device=where)
        scale = 0.02 if len(shape) == 1 else 1 / math.sqrt(shape[-1])
        if name == "model.embed_tokens.weight":
            scale = self.embedding_scale
        start, size = zlib.crc32(name.encode()) % POOL, math.prod(shape)
        numbers = self._pool(where).repeat(-(-(start + size) // POOL))[start : start + size]
        return numbers.mul_(scale).reshape(shape)

    def _pool(self, device: torch.device) -> Tensor:
        if device not in self._pools:
            generator = torch.Generator(device).manual_seed(self.seed)
            numbers = torch.randn(POOL, device=device, dtype=torch.float32, generator=generator)
            self._pools[device] = numbers.to(self.dtype)
        return self._pools[device]


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor of a decoder with this configuration."""
    kind = config.get("model_type", "llama")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    vocab = config["vocab_size"]
    bias = kind in ("qwen2", "qwen2_moe") or bool(config.get("attention_bias"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocab, hidden)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if kind in ("gemma2", "gemma3_text"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{norm}.weight": (hidden,) for norm in norms}
        attention = f"{prefix}.self_attn"
        shapes[f"{attention}.o_proj.weight"] = (hidden, heads * head_dim)
        if kind == "phi3":
            shapes[f"{attention}.qkv_proj.weight"] = ((heads + 2 * kv_heads) * head_dim, hidden)
        else:
            for projection, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                shapes[f"{attention}.{projection}_proj.weight"] = (count * head_dim, hidden)
                if bias:
                    shapes[f"{attention}.{projection}_proj.bias"] = (count * head_dim,)
        if config.get("attention_bias") and kind == "llama":
            shapes[f"{attention}.o_proj.bias"] = (hidden,)
        if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
            shapes[f"{attention}.q_norm.weight"] = shapes[f"{attention}.k_norm.weight"] = (head_dim,)
        shapes |= _feed_forward(config, kind, prefix)
    return shapes


def _feed_forward(config: dict[str, Any], kind: str, prefix: str) -> dict[str, tuple[int, ...]]:
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    if kind == "phi3":
        return {f"{prefix}.mlp.gate_up_proj.weight": (2 * ffn, hidden), f"{prefix}.mlp.down_proj.weight": (hidden, ffn)}
    if kind == "mixtral":
        moe = f"{prefix}.block_sparse_moe"
        shapes: dict[str, tuple[int, ...]] = {f"{moe}.gate.weight": (config["num_local_experts"], hidden)}
        for expert in range(config["num_local_experts"]):
            shapes[f"{moe}.experts.{expert}.w1.weight"] = (ffn, hidden)
            shapes[f"{moe}.experts.{expert}.w2.weight"] = (hidden, ffn)
            shapes[f"{moe}.experts.{expert}.w3.weight"] = (ffn, hidden)
        return shapes
    if kind in ("qwen2_moe", "qwen3_moe"):
        shapes = {f"{prefix}.mlp.gate.weight": (config["num_experts"], hidden)}
        for expert in range(config["num_experts"]):
            shapes |= _gated(f"{prefix}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
        shared = config.get("shared_expert_intermediate_size")
        if shared:
            shapes |= _gated(f"{prefix}.mlp.shared_expert", hidden, shared)
            shapes[f"{prefix}.mlp.shared_expert_gate.weight"] = (1, hidden)
        return shapes
    return _gated(f"{prefix}.mlp", hidden, ffn)


def _gated(prefix: str, hidden: int, ffn: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (ffn, hidden),
        f"{prefix}.up_proj.weight": (ffn, hidden),
        f"{prefix}.down_proj.weight": (hidden, ffn),
    }
