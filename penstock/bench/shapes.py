"""Named model shapes, as Hugging Face configurations, and what a step over one must read and compute.

A shape is enough to time an engine: random weights cost the same as trained ones. What a step must read and compute
is counted from the configuration alone, so that the engine is measured against what the model needs and not against
its own bookkeeping; only how many bytes a weight takes depends on how it is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.engine.models.families import HFConfig, family_of, read_config
from penstock.engine.models.model_config import ModelConfig
from penstock.errors import ConfigError


def _shape(
    family: str, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, head_dim: int, **keys: Any
) -> dict[str, Any]:
    described = family_of(family)
    return {
        "architectures": [described.class_name],
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": described.hidden_act,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **keys,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": _shape("llama", 4096, 14336, 32, 32, 8, 128, max_position_embeddings=131072),
    "llama-70b": _shape("llama", 8192, 28672, 80, 64, 8, 128, max_position_embeddings=131072),
    "qwen3-0.6b": _shape(
        "qwen3", 1024, 3072, 28, 16, 8, 128,
        rms_norm_eps=1e-6, rope_theta=1000000.0, max_position_embeddings=40960, vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "smollm2-135m": _shape(
        "llama", 576, 1536, 30, 9, 3, 64, rope_theta=100000.0, vocab_size=49152, tie_word_embeddings=True
    ),
    "mixtral-8x7b": _shape(
        "mixtral", 4096, 14336, 32, 32, 8, 128,
        num_local_experts=8, num_experts_per_tok=2, rope_theta=1000000.0, max_position_embeddings=32768,
        vocab_size=32000,
    ),
    "qwen3-30b-a3b": _shape(
        "qwen3_moe", 2048, 6144, 48, 32, 4, 128,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
        rms_norm_eps=1e-6, rope_theta=1000000.0, max_position_embeddings=40960, vocab_size=151936,
    ),
    "gemma2-2b": _shape(
        "gemma2", 2304, 9216, 26, 8, 4, 256,
        query_pre_attn_scalar=256, attn_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window=4096,
        rms_norm_eps=1e-6, rope_theta=10000.0, vocab_size=256000, tie_word_embeddings=True,
    ),
    "gemma3-1b": _shape(
        "gemma3_text", 1152, 6912, 26, 4, 1, 256,
        query_pre_attn_scalar=256, sliding_window=512, sliding_window_pattern=6, rms_norm_eps=1e-6,
        rope_theta=1000000.0, rope_local_base_freq=10000.0, max_position_embeddings=32768, vocab_size=262144,
        tie_word_embeddings=True,
    ),
    "phi3-mini": _shape(
        "phi3", 3072, 8192, 32, 32, 32, 96,
        rope_theta=10000.0, max_position_embeddings=4096, sliding_window=2047, vocab_size=32064,
    ),
}  # fmt: skip


def parameters(config: HFConfig) -> tuple[int, int]:
    """Parameters of a decoder's layer matrices, all experts included, and of its head; no biases, no norms."""
    model = read_config(config)
    experts = 0 if model.moe is None else model.moe.experts * _expert_parameters(model)
    return _dense_parameters(model) + experts, model.vocab_size * model.hidden_size


def _dense_parameters(model: ModelConfig) -> int:
    """Parameters that every token passes: attention, and the router or the feed-forward."""
    attention = 2 * model.head_dim * (model.num_heads + model.num_kv_heads)
    routed = 0 if model.moe is None else sum(model.moe.layers)
    experts = 0 if model.moe is None else model.moe.experts
    feed_forwards = (model.num_layers - routed) * 3 * model.ffn_size + routed * experts
    return model.hidden_size * (model.num_layers * attention + feed_forwards)


def _expert_parameters(model: ModelConfig) -> int:
    """Of one expert, over all layers."""
    return 0 if model.moe is None else sum(model.moe.layers) * 3 * model.hidden_size * model.moe.ffn_size


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
        """Bytes of weights that a step of this many tokens reads. The embedding table is not counted unless it is the
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


def cost(config: HFConfig, *, weight_bytes: float, kv_bytes: float) -> Cost:
    """Count from a Hugging Face configuration."""
    model = read_config(config)
    return Cost(
        linear_params=_dense_parameters(model),
        head_params=model.vocab_size * model.hidden_size,
        kv_elements=2 * model.num_layers * model.num_kv_heads * model.head_dim,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        experts=0 if model.moe is None else model.moe.experts,
        experts_per_token=0 if model.moe is None else model.moe.top_k,
        expert_params=_expert_parameters(model),
    )
