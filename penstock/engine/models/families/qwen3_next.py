"""Qwen3-Next: gated delta nets in most layers, gated attention in the others, experts with a shared one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.engine.models.families.family import (
    NEXTN_KEY,
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    drafting_layers,
    flag,
    integer,
    layer_count,
)
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.moe_config import MoeConfig
from penstock.engine.models.recurrence_config import DeltaConfig
from penstock.engine.models.rope import read_rope
from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from penstock.engine.models.architecture import Architecture

_INTERVAL = 4
_ROTATED = 0.25
RECURRENT, ATTENTION = "linear_attention", "full_attention"
HYBRID_READS = frozenset({
    "attention_bias", "full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim",
    "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads", "num_nextn_predict_layers",
})  # fmt: skip


def hybrid_architecture() -> Architecture:
    from penstock.engine.models.qwen3_next import QWEN3_NEXT_LIKE

    return QWEN3_NEXT_LIKE


def hybrid_fields(
    raw: HFConfig, *, grouped: bool, rotated: float = _ROTATED, attention: tuple[str, ...] = (ATTENTION,)
) -> ConfigFields:
    """What the families with delta nets have in common; `grouped`: see `DeltaLayout`. `rotated`: the share of a head
    where the configuration does not say it; `attention`: what `layer_types` calls the other layers."""
    bias = flag(raw, "attention_bias")
    rope: Any = raw.get("rope_scaling") or raw.get("rope_parameters")
    if isinstance(rope, dict):
        # Axes of images; those of text are all the position.
        rope = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    keys = {key: value for key, value in raw.items() if value is not None}
    if "partial_rotary_factor" not in raw:  # null means all of it, as in the reference
        keys["partial_rotary_factor"] = rotated
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "qk_norm": True,
        "gated_attention": True,
        "rope": read_rope(keys, rope or {}, partial=True),
        "delta": DeltaConfig(
            layers=_recurrent_layers(raw, attention),
            k_heads=integer(raw, "linear_num_key_heads"),
            v_heads=integer(raw, "linear_num_value_heads"),
            k_dim=integer(raw, "linear_key_head_dim"),
            v_dim=integer(raw, "linear_value_head_dim"),
            conv=integer(raw, "linear_conv_kernel_dim"),
            grouped=grouped,
        ),
    }


def _recurrent_layers(raw: HFConfig, attention: tuple[str, ...]) -> tuple[bool, ...]:
    if raw.get("layer_types") is None:
        interval = integer(raw, "full_attention_interval", _INTERVAL)
        return tuple((index + 1) % interval != 0 for index in range(layer_count(raw)))
    return recurrent_by_type(raw, attention)


def recurrent_by_type(raw: HFConfig, attention: tuple[str, ...] = (ATTENTION,)) -> tuple[bool, ...]:
    """From `layer_types`: which layers have linear attention. `attention`: what the others may be called."""
    layers, kinds, known = layer_count(raw), raw["layer_types"], (RECURRENT, *attention)
    if not isinstance(kinds, list | tuple) or {*map(str, kinds)} - {*known} or len(kinds) != layers:
        raise CheckpointError(
            f"layer_types must name one of {', '.join(known)} for each of {layers} layers, found {kinds!r:.80}"
        )
    return tuple(kind == RECURRENT for kind in kinds)


def shared_moe(raw: HFConfig, layers: tuple[bool, ...], *, normalize: bool) -> MoeConfig:
    """Experts beside a gated shared one, in `layers`."""
    return MoeConfig(
        experts=integer(raw, "num_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=integer(raw, "moe_intermediate_size"),
        normalize=normalize,
        layers=layers,
        shared_ffn_size=integer(raw, "shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _fields(raw: HFConfig) -> ConfigFields:
    fields, layers = hybrid_fields(raw, grouped=True), layer_count(raw)
    step, dense = integer(raw, "decoder_sparse_step"), raw["mlp_only_layers"] or ()
    if not isinstance(dense, list | tuple):
        raise CheckpointError(f"config key 'mlp_only_layers' must be a list, found {dense!r:.80}")
    sparse = tuple(index not in dense and (index + 1) % step == 0 for index in range(layers))
    if raw["num_experts"] != 0 and any(sparse):
        fields["moe"] = shared_moe(raw, sparse, normalize=flag(raw, "norm_topk_prob"))
    return fields


GGUF_READS = frozenset({
    "full_attention_interval", "ssm.conv_kernel", "ssm.group_count", "ssm.inner_size", "ssm.state_size",
    "ssm.time_step_rank", NEXTN_KEY,
})  # fmt: skip
GGUF_EXPERTS = frozenset({
    "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length",
})  # fmt: skip
GGUF_TENSORS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


def hybrid_from_gguf(key: GGUFKeys, config: HFConfig) -> dict[str, Any]:
    """What delta nets are made of, and how many layers there are."""
    values, inner = key.whole("ssm.time_step_rank", 0), key.whole("ssm.inner_size", 0)
    if not values or inner % values:
        raise CheckpointError(
            f"GGUF key {key.architecture}.ssm.inner_size: {inner} is not a size of {values} heads (ssm.time_step_rank)"
        )
    return {
        **drafting_layers(key, config),
        "full_attention_interval": key.whole("full_attention_interval", _INTERVAL),
        "linear_conv_kernel_dim": key.whole("ssm.conv_kernel", 0),
        "linear_num_key_heads": key.whole("ssm.group_count", 0),
        "linear_num_value_heads": values,
        "linear_key_head_dim": key.whole("ssm.state_size", 0),
        "linear_value_head_dim": inner // values,
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),  # a file says what it rotates, or all
    }


def experts_from_gguf(key: GGUFKeys) -> dict[str, Any]:
    return {
        "num_experts": key.whole("expert_count", 0),
        "num_experts_per_tok": key.whole("expert_used_count", 0),
        "moe_intermediate_size": key.whole("expert_feed_forward_length", 0),
        "shared_expert_intermediate_size": key.whole("expert_shared_feed_forward_length", 0),
    }


def _from_gguf(key: GGUFKeys, config: HFConfig) -> dict[str, Any]:
    experts = {**experts_from_gguf(key), "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return hybrid_from_gguf(key, config) | experts


QWEN3_NEXT = Family(
    model_type="qwen3_next",
    class_name="Qwen3NextForCausalLM",
    fields=_fields,
    reads=HYBRID_READS
    | {
        "decoder_sparse_step",
        "mlp_only_layers",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "norm_topk_prob",
    },
    norm_offset=1.0,
    names=TensorNames(
        recurrent=("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "out_proj"), shared_expert="shared_expert."
    ),
    gguf=GGUFFormat(
        architectures=("qwen3next",),
        config=_from_gguf,
        reads=GGUF_READS | GGUF_EXPERTS,
        whole_head_rotated=False,
        windowed=False,
        delta_nets="grouped",
        tensors=GGUF_TENSORS,
    ),
    architecture=hybrid_architecture,
)
