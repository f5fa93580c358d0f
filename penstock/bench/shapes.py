"""Named model shapes, as Hugging Face configurations, and what a step over one must read and compute.

A shape is enough to time an engine: random weights cost the same as trained ones. What a step must read and compute
is counted from the configuration alone, so that the engine is measured against what the model needs and not against
its own bookkeeping; only how many bytes a weight takes depends on how it is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError

Config = Mapping[str, Any]


def _llama(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": _llama(4096, 14336, 32, 32, 8, 128),
    "llama-70b": _llama(8192, 28672, 80, 64, 8, 128),
    "qwen3-0.6b": _llama(1024, 3072, 28, 16, 8, 128)
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "smollm2-135m": _llama(576, 1536, 30, 9, 3, 64)
    | {"rope_theta": 100000.0, "vocab_size": 49152, "tie_word_embeddings": True},
}


def parameters(config: Config) -> tuple[int, int]:
    """Parameters of a dense decoder's layer matrices, and of its head. Biases and norms are left out."""
    hidden, ffn, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads, head_dim = _heads(config)
    per_layer = hidden * head_dim * (heads + 2 * kv_heads) + heads * head_dim * hidden + 3 * hidden * ffn
    return layers * per_layer, config["vocab_size"] * hidden


def _heads(config: Config) -> tuple[int, int, int]:
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    return heads, kv_heads, config.get("head_dim") or config["hidden_size"] // heads


def named(name: str) -> dict[str, Any]:
    """The configuration of a shape; a readable error lists the others."""
    try:
        return dict(SHAPES[name])
    except KeyError:
        raise ConfigError(f"unknown shape {name!r}; there are: {', '.join(SHAPES)}") from None


@dataclass(frozen=True, slots=True)
class Cost:
    """What one step over a dense decoder must read and compute, at the least."""

    linear_params: int
    """Parameters of the layers' matrices: each is read once per step and used once per token."""
    head_params: int
    """Parameters of the output head: read once per step, used once per sampled token."""
    kv_elements: int
    """Keys and values kept per token of context, over all layers."""
    weight_bytes: float
    """Mean bytes of one weight as stored."""
    kv_bytes: float
    """Bytes of one element of the KV cache."""

    @property
    def weights(self) -> int:
        """Bytes of weights a step reads. The embedding table is not counted unless it is the head: a step
        reads a few rows of it."""
        return round((self.linear_params + self.head_params) * self.weight_bytes)

    def context(self, tokens: int) -> int:
        """Bytes of keys and values read to attend over this many tokens of context."""
        return round(tokens * self.kv_elements * self.kv_bytes)

    def flops(self, tokens: int, sampled: int) -> int:
        """Multiply-adds of the matrices, counted as two operations. Attention scores are left out, so the
        figure is a little low for long contexts and small models."""
        return 2 * (self.linear_params * tokens + self.head_params * sampled)


def cost(config: Config, *, weight_bytes: float, kv_bytes: float) -> Cost:
    """Count from a Hugging Face configuration of a dense decoder."""
    linear_params, head_params = parameters(config)
    _, kv_heads, head_dim = _heads(config)
    return Cost(
        linear_params=linear_params,
        head_params=head_params,
        kv_elements=2 * config["num_hidden_layers"] * kv_heads * head_dim,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
    )
