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
    "mixtral-8x7b": _llama(4096, 14336, 32, 32, 8, 128)
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "vocab_size": 32000,
    },
    "qwen3-30b-a3b": _llama(2048, 6144, 48, 32, 4, 128)
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
    },
    "gemma2-2b": _llama(2304, 9216, 26, 8, 4, 256)
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": 256000,
        "tie_word_embeddings": True,
    },
    "gemma3-1b": _llama(1152, 6912, 26, 4, 1, 256)
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "max_position_embeddings": 32768,
        "vocab_size": 262144,
        "tie_word_embeddings": True,
    },
    "phi3-mini": _llama(3072, 8192, 32, 32, 32, 96)
    | {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "sliding_window": 2047,
        "vocab_size": 32064,
    },
}


def parameters(config: Config) -> tuple[int, int]:
    """Parameters of a decoder's layer matrices, all experts included, and of its head; no biases, no norms."""
    experts, _, expert = _experts(config)
    return _dense(config) + experts * expert, config["vocab_size"] * config["hidden_size"]


def _dense(config: Config) -> int:
    """Parameters that every token passes: attention, and the router or the feed-forward."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv_heads, head_dim = _heads(config)
    experts, _, _ = _experts(config)
    feed_forward = experts * hidden if experts else 3 * hidden * config["intermediate_size"]
    return int(layers * (2 * hidden * head_dim * (heads + kv_heads) + feed_forward))


def _experts(config: Config) -> tuple[int, int, int]:
    """Experts of a layer, how many of them a token visits, and the parameters of one, over all layers."""
    count = config.get("num_experts") or config.get("num_local_experts") or 0
    ffn = config.get("moe_intermediate_size") or config["intermediate_size"]
    size = config["num_hidden_layers"] * 3 * config["hidden_size"] * ffn
    return (count, config["num_experts_per_tok"], size) if count else (0, 0, 0)


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
    """What one step over a decoder must read and compute, at the least."""

    linear_params: int
    """Parameters of the layers' matrices that every token passes: read once per step, used once per token."""
    head_params: int
    """Parameters of the output head: read once per step, used once per sampled token."""
    kv_elements: int
    """Keys and values kept per token of context, over all layers. Sliding windows are not counted."""
    weight_bytes: float
    """Mean bytes of one weight as stored."""
    kv_bytes: float
    """Bytes of one element of the KV cache."""
    experts: int = 0
    experts_per_token: int = 0
    expert_params: int = 0
    """Parameters of one expert, over all layers."""

    def weights(self, tokens: int) -> int:
        """Bytes of weights that a step of so many tokens reads. The embedding table is not counted unless it is the
        head: a step reads a few rows of it. Of the experts, those that as many tokens visit if all are as likely."""
        visited = 0.0
        if self.experts:
            visited = self.experts * (1 - (1 - self.experts_per_token / self.experts) ** tokens)
        return round((self.linear_params + visited * self.expert_params + self.head_params) * self.weight_bytes)

    def context(self, tokens: int) -> int:
        """Bytes of keys and values read to attend over this many tokens of context."""
        return round(tokens * self.kv_elements * self.kv_bytes)

    def flops(self, tokens: int, sampled: int) -> int:
        """Multiply-adds of the matrices, counted as two operations. Attention scores are left out, so the
        figure is a little low for long contexts and small models."""
        per_token = self.linear_params + self.experts_per_token * self.expert_params
        return 2 * (per_token * tokens + self.head_params * sampled)


def cost(config: Config, *, weight_bytes: float, kv_bytes: float) -> Cost:
    """Count from a Hugging Face configuration."""
    _, kv_heads, head_dim = _heads(config)
    experts, per_token, expert = _experts(config)
    return Cost(
        linear_params=_dense(config),
        head_params=config["vocab_size"] * config["hidden_size"],
        kv_elements=2 * config["num_hidden_layers"] * kv_heads * head_dim,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        experts=experts,
        experts_per_token=per_token,
        expert_params=expert,
    )
