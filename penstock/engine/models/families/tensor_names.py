"""Names of a family's tensors in its checkpoints. The defaults are Llama's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names in a safetensors checkpoint, below `layers.N.`."""

    prefix: str = "model."
    """What all of them begin with, but that of the head."""
    embedding: str = "embed_tokens"
    """In front of the first layer; not below it."""
    final_norm: str = "norm"
    """Behind the last layer."""
    mixer_norm: str = "input_layernorm"
    feed_forward_norm: str = "post_attention_layernorm"
    mixer_out_norm: str = ""
    feed_forward_out_norm: str = ""
    """Of families with sandwich norms: what attention and feed-forward give is normalized too."""
    attention: str = "self_attn."
    qkv: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    output_gate: str = ""
    """Of attention whose output passes a gate with a matrix of its own."""
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    """Of the heads of queries and keys, or of all of each together, where a family has such norms."""
    more_linears: tuple[str, ...] = ()
    """Further matrices of a layer, for a model file that composes attention of another kind."""
    mlp: str = "mlp."
    gate_up: tuple[str, str] = ("gate_proj", "up_proj")
    """Where feed-forwards have no gate, the second; of experts too."""
    down: str = "down_proj"
    fused_qkv: str = "qkv_proj"
    fused_gate_up: str = "gate_up_proj"
    """Of checkpoints that store the matrices above as one."""
    fused: bool = False
    """Whether the family's own checkpoints do."""
    moe: str = "mlp."
    """Of the block that holds the router and `experts.N.`."""
    router: str = "gate"
    correction_bias: str = "gate.e_score_correction_bias"
    """Where scores are corrected before experts are chosen."""
    expert_gains: str = ""
    """Of one factor for each expert."""
    shared_expert: str = "shared_experts."
    shared_gate: str = "shared_expert_gate"
    """Where every token visits one more expert; its matrices are called as those of a dense feed-forward."""
    expert_gate_up: tuple[str, str] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    expert_latents: tuple[str, str] = ("", "")
    """Of a block whose experts read fewer numbers than a token has: the matrices before and behind them."""
    expert_norms: tuple[str, str] = ("", "")
    """Of such a block: a norm behind the first of these matrices, and one behind every expert."""
    stacked_experts: bool = False
    """Whether the family's checkpoints store the experts of a layer as one tensor; see `loading.stacked_experts`."""
    interleaved_gate_up: bool = False
    """There: whether gate and up columns alternate."""
    expert_stacks: tuple[str, str] | None = None
    """Of checkpoints that store a layer's experts as stacks of ordinary matrices: gate and up, and down."""

    mamba: str = "mamba."
    """Of Mamba layers, in families that have some."""
    short_conv: str = "conv."
    """Of short convolutions, in families that have some."""
    recurrent: tuple[str, ...] = ()
    """Matrices of mixers other than attention that are quantized."""

    @property
    def linears(self) -> frozenset[str]:
        """Last parts of the names of all matrices that are quantized: routers, embeddings and heads are not."""
        parts = (*self.qkv, self.output, *self.gate_up, self.down, *self.expert_gate_up, self.expert_down)
        more = (*self.expert_latents, *self.more_linears, *([self.output_gate] if self.output_gate else ()))
        return frozenset((*parts, *more, self.fused_qkv, self.fused_gate_up, *self.recurrent))


LLAMA_NAMES = TensorNames()

PREFIXES = (
    "", "model.", "language_model.model.", "model.language_model.", "language_model.", "model.text_model.",
    "model.language_model.model.", "thinker.model.", "thinker.model.language_model.",
)  # fmt: skip
"""Of the decoder's tensor names where they have not the family's own: of a model without head, as the reference calls
its own, and of multimodal models, published before and after the reference gave all of theirs the same form."""
HEADS = ("lm_head", "language_model.lm_head", "model.language_model.lm_head", "thinker.lm_head")
"""The matrix of logits, likewise."""


def prefix_of(stored: Collection[str], names: TensorNames) -> str:
    """What the names of the decoder's tensors begin with."""
    known = (names.prefix, *PREFIXES, f"language_model.{names.prefix}")
    return next((prefix for prefix in known if f"{prefix}{names.embedding}.weight" in stored), names.prefix)
