"""The shape of a decoder, read from a checkpoint's `config.json` keys by its family's descriptor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.engine.models.families import HFConfig, MoeConfig, family_of, integer, text_config
from penstock.engine.models.rope import RopeConfig, read_rope
from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from penstock.engine.backends.interface import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything the decoder needs to know about its shape. The defaults are those of Llama."""

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
    local_rope: RopeConfig | None = None
    """Of layers with a sliding window, where it is not that of the others."""
    windows: tuple[int | None, ...]
    """Sliding window of each layer; None where a layer sees everything."""
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: Activation = "silu"
    moe: MoeConfig | None = None
    sandwich_norms: bool = False
    """Whether the output of attention and feed-forward is normalized too, before it is added to the residual stream."""
    norm_offset: float = 0.0
    """Added to norm weights when they are read."""
    embedding_scale: float = 1.0
    attention_scale: float
    """Factor of the products of queries and keys."""
    attention_softcap: float | None = None
    """Scores s become cap * tanh(s / cap) before the softmax."""
    logit_softcap: float | None = None

    @classmethod
    def from_hf(cls, raw: HFConfig) -> ModelConfig:
        """Read Hugging Face `config.json` keys; a model that cannot be run exactly is refused, never approximated."""
        raw = text_config(raw)
        family = family_of(str(raw.get("model_type", "")))
        fields = family.fields(raw)
        family.check_activation(raw)
        heads = integer(raw, "num_attention_heads")
        hidden = integer(raw, "hidden_size")
        layers = integer(raw, "num_hidden_layers")
        kv_heads = integer(raw, "num_key_value_heads", heads)
        head_dim = integer(raw, "head_dim", hidden // heads)
        if heads % kv_heads or head_dim % 2:
            raise CheckpointError(f"{heads} heads over {kv_heads} KV heads of size {head_dim} cannot be run")
        fields.setdefault("tied_embeddings", bool(raw.get("tie_word_embeddings", False)))
        fields.setdefault("windows", (None,) * layers)
        fields.setdefault("attention_scale", head_dim**-0.5)
        if "rope" not in fields:
            fields["rope"] = read_rope(raw)
        return cls(
            family=family.model_type,
            hidden_size=hidden,
            ffn_size=integer(raw, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=integer(raw, "vocab_size"),
            max_positions=integer(raw, "max_position_embeddings", 2048),
            rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
            activation=family.activation,
            sandwich_norms=bool(family.names.mixer_out_norm),
            norm_offset=family.norm_offset,
            **fields,
        )

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Rotary embedding of each layer."""
        return tuple(self.rope if window is None else self.local_rope or self.rope for window in self.windows)

    @property
    def plain_layers(self) -> bool:
        """Whether every layer is norm, attention, norm, SiLU-gated feed-forward, and nothing else."""
        return self.moe is None and not self.sandwich_norms and self.activation == "silu"
