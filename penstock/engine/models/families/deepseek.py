"""DeepSeek V2 (Lite too), V3 and R1, and Kimi K2, which is V3 with other sizes: attention over latents, and experts of
which each token visits a few beside one that all tokens visit.

V3 scores experts by sigmoids, corrects the scores by which it chooses, and chooses from the best groups. V2 scores by
softmax. The layers for multi-token prediction that V3 checkpoints have behind the last layer
(`num_nextn_predict_layers` of them, named as if they were further layers) are no part of the decoder:
`speculative.mtp` reads the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.engine.models.attention_config import LatentConfig
from penstock.engine.models.families.deepseek_gguf import V2_FORMAT, V3_FORMAT
from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    flag,
    integer,
    layer_count,
    number,
)
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.moe_config import MoeConfig
from penstock.engine.models.rope import read_rope, rope_parameters
from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from penstock.engine.models.architecture import Architecture

NORM_EPS = 1e-6
"""Of the norms inside attention, whatever `rms_norm_eps` is."""
LATENT_KEYS = frozenset({
    "attention_bias", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim",
    "v_head_dim", "num_nextn_predict_layers", "num_mtp_layers",
})  # fmt: skip
_KEYS = LATENT_KEYS | {
    "first_k_dense_replace", "n_group", "topk_group", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
    "moe_intermediate_size", "moe_layer_freq", "norm_topk_prob", "routed_scaling_factor",
}  # fmt: skip
LATENT_NAMES = TensorNames(more_linears=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"))
_LIMITS: Mapping[str, Any] = {"hidden_act": SILU}


def latent_architecture() -> Architecture:
    from penstock.engine.models.latent import LATENT_LIKE

    return LATENT_LIKE


def _count(raw: HFConfig, key: str) -> int:
    """An integer, not negative."""
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise CheckpointError(f"config key {key!r} must be an integer, not negative, found {value!r:.80}")
    return value


def optional_flag(raw: HFConfig, key: str) -> bool:
    """Null is false, as in the reference."""
    return raw.get(key) is not None and flag(raw, key)


def latent_fields(raw: HFConfig, interleaved: bool) -> ConfigFields:
    """Attention over latents."""
    plain, rotary = integer(raw, "qk_nope_head_dim"), integer(raw, "qk_rope_head_dim")
    heads = integer(raw, "num_attention_heads")
    if integer(raw, "num_key_value_heads", heads) != heads:
        raise CheckpointError("num_key_value_heads must be num_attention_heads: all heads share one latent")
    if raw.get("head_dim") not in (None, rotary):
        raise CheckpointError(f"head_dim is {raw['head_dim']!r:.80}; it must be qk_rope_head_dim, or left out")
    if rotary % 2:
        raise CheckpointError(f"qk_rope_head_dim is {rotary}; dimensions are rotated in pairs")
    bias = flag(raw, "attention_bias")
    narrow = None if raw.get("q_lora_rank") is None else integer(raw, "q_lora_rank")
    latent = LatentConfig(
        query_rank=narrow,
        rank=integer(raw, "kv_lora_rank"),
        plain=plain,
        rotary=rotary,
        value=integer(raw, "v_head_dim"),
        interleaved=interleaved,
        norm_eps=NORM_EPS,
        input_bias=bias,
    )
    return {
        "latent": latent,
        "head_dim": plain + rotary,
        "num_kv_heads": 1,
        "output_bias": bias,
        "rope": read_rope({**raw, "head_dim": rotary}),
        "attention_scale": _scale(raw, plain + rotary),
    }


def _scale(raw: HFConfig, dim: int) -> float:
    """Scores grow with the context that the rotary embedding is scaled for."""
    parameters, scale = rope_parameters(raw), float(dim**-0.5)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default" or not parameters.get("mscale_all_dim"):
        return scale
    factor, weight = number(parameters, "factor"), number(parameters, "mscale_all_dim")
    growth = 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
    return scale * growth * growth


def sparse_layers(raw: HFConfig) -> tuple[bool, ...]:
    """Which layers have experts. transformers does not know `moe_layer_freq`; DeepSeek's own code does."""
    dense, every = _count(raw, "first_k_dense_replace"), integer(raw, "moe_layer_freq", 1)
    return tuple(index >= dense and index % every == 0 for index in range(layer_count(raw)))


def routed_experts(raw: HFConfig, alias: str, **chosen: Any) -> MoeConfig | None:
    layers, ffn = sparse_layers(raw), integer(raw, "moe_intermediate_size")
    if not any(layers):
        return None
    return MoeConfig(
        experts=integer(raw, alias if alias in raw else "n_routed_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=ffn,
        layers=layers,
        scale=number(raw, "routed_scaling_factor"),
        shared_ffn_size=ffn * _count(raw, "n_shared_experts"),
        **chosen,
    )


def _v2_fields(raw: HFConfig) -> ConfigFields:
    method = raw.get("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointError(f"topk_method is {method!r:.80}; supported: 'greedy', 'group_limited_greedy'")
    grouped = method == "group_limited_greedy"
    # The reference does not scale these weights to sum to one, whatever `norm_topk_prob` says.
    moe = routed_experts(
        raw,
        "num_experts",
        normalize=False,
        groups=integer(raw, "n_group") if grouped else 1,
        top_groups=integer(raw, "topk_group") if grouped else 1,
    )
    return {**latent_fields(raw, interleaved=True), "moe": moe, "mlp_bias": flag(raw, "mlp_bias")}


def _v3_fields(raw: HFConfig) -> ConfigFields:
    moe = routed_experts(
        raw,
        "num_local_experts",
        normalize=optional_flag(raw, "norm_topk_prob"),
        scoring="sigmoid",
        correction_bias=True,
        groups=integer(raw, "n_group"),
        top_groups=integer(raw, "topk_group"),
        group_score="best_two",
    )
    return {**latent_fields(raw, interleaved=optional_flag(raw, "rope_interleave")), "moe": moe}


DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    class_name="DeepseekV2ForCausalLM",
    fields=_v2_fields,
    reads=_KEYS | {"num_experts", "topk_method", "mlp_bias"},
    limits={**_LIMITS, "scoring_func": ("softmax",)},
    gguf=V2_FORMAT,
    names=LATENT_NAMES,
    architecture=latent_architecture,
)
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    fields=_v3_fields,
    reads=_KEYS | {"num_local_experts", "rope_interleave"},
    limits={**_LIMITS, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    gguf=V3_FORMAT,
    names=LATENT_NAMES,
    architecture=latent_architecture,
)
KIMI_K2 = Family(
    model_type="kimi_k2",
    class_name="DeepseekV3ForCausalLM",
    fields=_v3_fields,
    reads=DEEPSEEK_V3.reads,
    limits=DEEPSEEK_V3.limits,
    gguf=GGUFFormat(architectures=()),
    reference="deepseek_v3",
    names=LATENT_NAMES,
    architecture=latent_architecture,
)
