"""Named model shapes, as Hugging Face configurations, and what a step over one must read and compute.

A shape is enough to time an engine: random weights cost the same as trained ones. What a step must read and compute
is counted from the configuration alone (`planning.shape`), so that the engine is measured against what the model needs
and not against its own bookkeeping; only how many bytes a weight takes depends on how it is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.engine.models.families import HFConfig, family_of, read_config
from penstock.engine.models.families.config_keys import reference_of
from penstock.errors import ConfigError
from penstock.planning.config_shape import shape_of_model
from penstock.planning.model_shape import ModelShape, known_config, with_layers

_NAMES = (
    "llama-8b", "llama-70b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "smollm2-135m", "mixtral-8x7b", "qwen3-30b-a3b",
    "gemma2-2b", "gemma3-1b", "phi3-mini", "deepseek-v2-lite", "gpt-oss-20b", "llama4-scout", "qwen3-next",
    "granite4-h-micro", "granite4-h-tiny", "granite4-h-small", "nemotron-h-8b", "nemotron3-nano-30b",
    "codestral-mamba-7b", "lfm2-1.2b", "lfm2-8b-a1b", "deepseek-v3.2", "kimi-linear-48b-a3b",
)  # fmt: skip
_LAYERS = {"llama4-scout": 16, "qwen3-next": 24, "deepseek-v3.2": 6}
"""Where not all fit into one GPU."""


def _whole(name: str) -> dict[str, Any]:
    """A known model's dimensions, and what an engine wants to know beside them."""
    known = known_config(name)
    if (known.get("quantization_config") or {}).get("quant_method") == "fp8":
        del known["quantization_config"]  # random weights are those of `torch_dtype`, and quantized as asked for
    described = family_of(known["model_type"])
    usual = {"hidden_act": described.hidden_act, "attention_bias": False, "mlp_bias": False}
    keys = reference_of(known["model_type"])
    return {
        "architectures": [described.class_name],
        **{key: value for key, value in usual.items() if key in keys},
        "torch_dtype": "bfloat16",
        **known,
    }


def _shape(name: str) -> dict[str, Any]:
    return with_layers(_whole(name), _LAYERS[name]) if name in _LAYERS else _whole(name)


SHAPES: dict[str, dict[str, Any]] = {name: _shape(name) for name in _NAMES}


def parameters(config: HFConfig) -> tuple[int, int]:
    """Parameters of a decoder's layer matrices, all experts included, and of its head; no biases, no norms."""
    shape = _counted(config)
    experts = 0 if shape.moe is None else shape.moe.experts * shape.expert_parameters
    return shape.matrix_parameters + experts, shape.head_parameters


def all_parameters(config: HFConfig) -> int:
    """Of the whole model, as its name counts them: with the embedding, biases and norms."""
    return _counted(config).parameters


def _counted(config: HFConfig) -> ModelShape:
    return shape_of_model(read_config(config), str(config.get("model_type")))


def named(name: str) -> dict[str, Any]:
    """The configuration of a shape, `name:24` the same with 24 layers; a readable error lists the others."""
    known, colon, layers = name.partition(":")
    if known not in SHAPES:
        raise ConfigError(f"unknown shape {name!r}; there are: {', '.join(SHAPES)}")
    if not colon:
        return dict(SHAPES[known])
    most = known_config(known)["num_hidden_layers"]
    if not (layers.isascii() and layers.isdigit() and 1 <= int(layers) <= most):
        raise ConfigError(f"shape {name!r}: the number behind the colon is one of layers, 1 to {most}")
    return with_layers(_whole(known), int(layers))


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
    expert_bytes: float = 0.0
    """Mean bytes of one of those; 0: as the others."""
    state_bytes: int = 0
    """Of recurrent layers, per sequence: read and written by every step."""

    def weights(self, tokens: int) -> int:
        """Bytes of weights that a step of this many tokens reads. The embedding table is not counted unless it is the
        head: a step reads a few rows of it. Of the experts, those that as many tokens visit if all are as likely."""
        visited = 0.0
        if self.experts:
            visited = self.experts * (1 - (1 - self.experts_per_token / self.experts) ** tokens)
        further = visited * self.expert_params * (self.expert_bytes or self.weight_bytes)
        return round((self.linear_params + self.head_params) * self.weight_bytes + further)

    def states(self, sequences: int) -> int:
        """Bytes of recurrent layers' states that a step over so many sequences reads and writes."""
        return 2 * sequences * self.state_bytes

    def context(self, tokens: int) -> int:
        """Bytes of keys and values read to attend over this many tokens of context."""
        return round(tokens * self.kv_elements * self.kv_bytes)

    def flops(self, tokens: int, sampled: int) -> int:
        """Multiply-adds of the matrices, counted as two operations. Attention scores are left out, so the
        figure is a little low for long contexts and small models."""
        per_token = self.linear_params + self.experts_per_token * self.expert_params
        return 2 * (per_token * tokens + self.head_params * sampled)


def expert_parameters(config: HFConfig) -> int:
    """Parameters of all experts' matrices."""
    shape = _counted(config)
    return 0 if shape.moe is None else shape.moe.experts * shape.expert_parameters


def cost(config: HFConfig, *, weight_bytes: float, kv_bytes: float, expert_bytes: float = 0.0) -> Cost:
    """Count from a Hugging Face configuration."""
    shape = _counted(config)
    return Cost(
        linear_params=shape.matrix_parameters,
        head_params=shape.head_parameters,
        kv_elements=shape.kv_elements,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        experts=0 if shape.moe is None else shape.moe.experts,
        experts_per_token=0 if shape.moe is None else shape.moe.top_k,
        expert_params=shape.expert_parameters,
        expert_bytes=expert_bytes,
        state_bytes=shape.state_bytes,
    )
