"""A decoder described by numbers: read from a checkpoint's `config.json` keys, refused when it is not one of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import CheckpointError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base frequency and how it is stretched for longer contexts."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the decoder needs to know about its shape."""

    family: str
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    """Sliding window of each layer; None where a layer sees everything."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read Hugging Face `config.json` keys; a model we cannot run exactly is refused, never approximated."""
        family = str(raw.get("model_type", ""))
        if family not in FAMILIES:
            raise CheckpointError(
                f"model_type {family or '(missing)'!r} is not supported; supported families: {', '.join(FAMILIES)}"
            )
        activation = raw.get("hidden_act", raw.get("hidden_activation", "silu"))
        if activation != "silu":
            raise CheckpointError(f"hidden_act {activation!r} is not supported for {family} models; only 'silu' is")
        heads = _integer(raw, "num_attention_heads")
        hidden = _integer(raw, "hidden_size")
        layers = _integer(raw, "num_hidden_layers")
        kv_heads = _integer(raw, "num_key_value_heads", heads)
        head_dim = _integer(raw, "head_dim", hidden // heads)
        if heads % kv_heads or head_dim % 2:
            raise CheckpointError(f"{heads} heads over {kv_heads} KV heads of size {head_dim} cannot be run")
        llama_bias = bool(raw.get("attention_bias", False))
        return cls(
            family=family,
            hidden_size=hidden,
            ffn_size=_integer(raw, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=_integer(raw, "vocab_size"),
            max_positions=_integer(raw, "max_position_embeddings", 2048),
            rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=_rope(raw),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or llama_bias,
            output_bias=family != "qwen2" and llama_bias,
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            windows=_windows(raw, family, layers),
        )

    @property
    def parameters(self) -> int:
        """Number of weights, without biases and norms."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.ffn_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * layer + embeddings


def _integer(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or value <= 0:
        raise CheckpointError(f"config key {key!r} must be a positive integer, found {value!r}")
    return value


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    # Newer files keep everything under rope_parameters; older ones have rope_theta beside rope_scaling.
    scaling: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta", raw.get("rope_theta", 10000.0)))
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    positions = int(raw.get("max_position_embeddings", 2048))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise CheckpointError(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3, yarn")
    attention_factor = scaling.get("attention_factor")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_positions=int(scaling.get("original_max_position_embeddings", positions)),
        beta_fast=float(scaling.get("beta_fast", 32.0)),
        beta_slow=float(scaling.get("beta_slow", 1.0)),
        attention_factor=None if attention_factor is None else float(attention_factor),
    )


def _windows(raw: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if window is None or family == "llama":
        return (None,) * layers
    kinds = raw.get("layer_types")
    if kinds is not None:
        return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
    if family == "mistral":
        return (int(window),) * layers
    if not raw.get("use_sliding_window", False):
        return (None,) * layers
    full = int(raw.get("max_window_layers", layers))
    return tuple(None if index < full else int(window) for index in range(layers))
