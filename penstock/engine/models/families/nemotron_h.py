"""Nemotron-H: each layer is a Mamba-2 mixer, attention without rotary embedding, or a feed-forward of squared ReLUs,
dense or (Nemotron 3) of experts beside one that all tokens visit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine.models.families.family import (
    MOST_LAYERS,
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    count,
    flag,
    integer,
    number,
)
from penstock.engine.models.families.mamba import SSM_KEYS, ssm_sizes
from penstock.engine.models.families.mamba2 import NAMES, UNUSED, one_part_architecture, one_part_from_gguf
from penstock.engine.models.families.sigmoid_experts import require_sigmoid
from penstock.engine.models.model_config import LayerPart
from penstock.engine.models.moe_config import MoeConfig
from penstock.engine.models.recurrence_config import MambaConfig
from penstock.engine.models.rope import NO_ROPE
from penstock.errors import CheckpointError

_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_DEFAULT = "ME*-"
_NEWER = {"linear_attention": "mamba", "full_attention": "attention"}
_EXPERTS = frozenset({
    "n_routed_experts", "num_local_experts", "n_shared_experts", "moe_intermediate_size",
    "moe_shared_expert_intermediate_size", "moe_latent_size", "moe_shared_expert_overlap", "num_experts_per_tok",
    "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob",
})  # fmt: skip
"""Of layers of experts. The reference has one shared expert of the width that is given, whatever their number, and adds
it in one order, whether or not it is said to overlap with the others."""
_OLDER = {
    "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}  # fmt: skip
"""Keys of older files, which the reference prefers where a file has both."""
_IGNORED = frozenset({
    "mamba_expand", "mamba_dt_max", "mamba_dt_limit", "mamba_dt_init_floor", "mamba_chunk_size", "time_step_limit",
    "mamba_proj_bias", "mamba_ssm_cache_dtype", "use_mamba_kernels", "num_logits_to_keep", "num_nextn_predict_layers",
    "mtp_layers_block_type", "mtp_hybrid_override_pattern",
})  # fmt: skip
"""Keys that the reference has no use for when it runs the layers; states are float32 here."""


_GGUF = frozenset({
    "expert_count", "expert_used_count", "expert_shared_count", "expert_feed_forward_length",
    "expert_shared_feed_forward_length", "expert_weights_norm", "expert_weights_scale", "expert_group_count",
    "expert_group_used_count", "expert_gating_func", "moe_latent_size",
})  # fmt: skip


def _fields(raw: HFConfig) -> ConfigFields:
    raw = {**raw, **{new: raw[old] for old, new in _OLDER.items() if raw.get(old) is not None}}
    kinds = _layers(raw)
    bias, eps = flag(raw, "use_bias"), number(raw, "layer_norm_epsilon")
    only: tuple[LayerPart, ...] = tuple("feed_forward" if kind in ("mlp", "moe") else "mixer" for kind in kinds)
    fields: ConfigFields = {
        "num_layers": len(kinds),
        "only": only,
        "activation": "relu2",
        "mlp_bias": flag(raw, "mlp_bias"),
        "rms_eps": eps,
        "rope": NO_ROPE,
    }
    if "moe" in kinds:
        fields["moe"] = _experts(raw, kinds)
    if "mlp" not in kinds:
        fields["ffn_size"] = 0
    if "mamba" in kinds:
        groups = integer(raw, "n_groups")
        fields["mamba"] = MambaConfig(
            layers=tuple(kind == "mamba" for kind in kinds),
            heads=integer(raw, "mamba_num_heads"),
            head_dim=integer(raw, "mamba_head_dim"),
            groups=groups,
            state=integer(raw, "ssm_state_size"),
            conv=integer(raw, "conv_kernel"),
            conv_bias=flag(raw, "use_conv_bias"),
            in_bias=bias,
            out_bias=bias,
            norm_groups=groups,
            norm_eps=eps,
            dt_range=(max(0.0, number(raw, "time_step_min")), math.inf),
        )
    return fields


def _experts(raw: HFConfig, kinds: Sequence[str]) -> MoeConfig:
    return MoeConfig(
        experts=integer(raw, "num_local_experts" if "num_local_experts" in raw else "n_routed_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=integer(raw, "moe_intermediate_size"),
        normalize=flag(raw, "norm_topk_prob"),
        layers=tuple(kind == "moe" for kind in kinds),
        scoring="sigmoid",
        correction_bias=True,
        groups=integer(raw, "n_group"),
        top_groups=integer(raw, "topk_group"),
        group_score="best_two",
        scale=number(raw, "routed_scaling_factor"),
        shared_ffn_size=count(raw, "moe_shared_expert_intermediate_size") or integer(raw, "intermediate_size"),
        latent=0 if raw.get("moe_latent_size") is None else integer(raw, "moe_latent_size"),
    )


def _layers(raw: HFConfig) -> Sequence[str]:
    """What each layer is, by a list of names or a pattern of letters."""
    found = next((raw[key] for key in ("layers_block_type", "layer_types") if raw.get(key) is not None), None)
    if found is None:
        pattern = raw.get("hybrid_override_pattern", _DEFAULT)
        if not isinstance(pattern, str):
            raise CheckpointError(f"config key 'hybrid_override_pattern' must be a string, found {pattern!r:.80}")
        found = [_PATTERN.get(letter, letter) for letter in pattern]
    if not isinstance(found, list | tuple) or not 0 < len(found) <= MOST_LAYERS:
        raise CheckpointError(f"config key 'layers_block_type' must name each layer, found {found!r:.80}")
    kinds = [_NEWER.get(kind, kind) for kind in map(str, found)]
    unknown = set(kinds) - set(_PATTERN.values())
    if unknown:
        raise CheckpointError(f"layers of a Nemotron-H model cannot be {', '.join(sorted(unknown)):.80}")
    return kinds


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    """Layers with KV heads are attention, those with a width feed-forwards, the others Mamba's."""
    heads, size = ssm_sizes(keys)
    layers, experts = config["num_hidden_layers"], keys.whole("expert_count", 0)
    kv_heads, widths = (keys.each(name, layers) for name in ("attention.head_count_kv", "feed_forward_length"))
    kinds = [
        "full_attention" if own else "linear_attention" if not width else "moe" if experts else "mlp"
        for own, width in zip(kv_heads, widths, strict=True)
    ]
    found = {
        **one_part_from_gguf(keys, config),
        "mamba_num_heads": heads,
        "mamba_head_dim": size,
        "ssm_state_size": keys.whole("ssm.state_size", 0),
        "layers_block_type": kinds,
        "mlp_hidden_act": "relu2",
    }
    if not experts:
        return found
    require_sigmoid(keys)
    normalized = keys("expert_weights_norm", False)
    if not isinstance(normalized, bool):
        raise CheckpointError(f"expert_weights_norm must be true or false, found {normalized!r:.80}")
    return {
        **found,
        "n_routed_experts": experts,
        "n_shared_experts": keys.whole("expert_shared_count", 0),
        "num_experts_per_tok": keys.whole("expert_used_count", 0),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length", 0) or max(widths),
        "moe_shared_expert_intermediate_size": keys.whole("expert_shared_feed_forward_length", 0),
        "moe_latent_size": keys.whole("moe_latent_size", 0) or None,
        "norm_topk_prob": normalized,
        "routed_scaling_factor": keys.number("expert_weights_scale", 0.0) or 1.0,
        "n_group": keys.whole("expert_group_count", 0) or 1,
        "topk_group": keys.whole("expert_group_used_count", 0) or 1,
    }


_NAMES = dataclasses.replace(
    NAMES,
    moe="mixer.",
    expert_gate_up=("", "up_proj"),
    expert_latents=("fc1_latent_proj", "fc2_latent_proj"),
    expert_stacks=("mixer.experts.up_proj", "mixer.experts.down_proj"),
)
NEMOTRON_H = Family(
    model_type="nemotron_h",
    class_name="NemotronHForCausalLM",
    fields=_fields,
    reads=UNUSED
    | _EXPERTS
    | _IGNORED
    | _OLDER.keys()
    | {
        "layers_block_type",
        "hybrid_override_pattern",
        "mamba_num_heads",
        "mamba_head_dim",
        "n_groups",
        "ssm_state_size",
        "conv_kernel",
        "use_bias",
        "use_conv_bias",
        "layer_norm_epsilon",
        "mlp_bias",
    },
    limits={"mamba_hidden_act": SILU, "mlp_hidden_act": ("relu2",)},
    names=_NAMES,
    gguf=GGUFFormat(
        architectures=("nemotron_h", "nemotron_h_moe"),
        interleaved_rope=True,  # though nothing is rotated
        mamba=True,
        config=_from_gguf,
        reads=SSM_KEYS | _GGUF,
        tensors={
            "ffn_up_shexp": "mixer.shared_experts.up_proj",
            "ffn_down_shexp": "mixer.shared_experts.down_proj",
            "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
            "ffn_latent_down": "mixer.fc1_latent_proj",
            "ffn_latent_up": "mixer.fc2_latent_proj",
        },
    ),
    architecture=one_part_architecture,
)
