"""Kimi Linear: delta nets in which every channel forgets at its own rate (KDA) in most layers, attention over latents
without rotary embedding in the others, and DeepSeek V3's experts.

Published files and those that transformers writes have other names for several keys and tensors; here tensors are
called as in transformers' memory. In GGUF files (`kimi-linear`) layers without KV heads are delta nets, which have as
many heads as attention, and the others are described in the space of the latents, as DeepSeek's are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.engine.models.families.deepseek import LATENT_KEYS, LATENT_NAMES, latent_fields
from penstock.engine.models.families.deepseek_gguf import LATENT_TENSORS
from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    count,
    integer,
    layer_count,
    mapping,
)
from penstock.engine.models.families.qwen3_next import recurrent_by_type
from penstock.engine.models.families.sigmoid_experts import (
    CORRECTED_GGUF,
    CORRECTED_KEYS,
    corrected_from_gguf,
    corrected_sigmoids,
    sparse_by_type,
)
from penstock.engine.models.recurrence_config import DeltaConfig
from penstock.engine.models.rope import STILL
from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from penstock.engine.models.architecture import Architecture

_PERIOD = 4
_OTHER_NAMES = {
    "num_experts_per_token": "num_experts_per_tok", "num_expert_group": "n_group", "num_experts": "num_local_experts",
    "num_shared_experts": "n_shared_experts", "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
}  # fmt: skip
"""Of published files, which the reference prefers, and its own."""
_WITHOUT_EFFECT = frozenset({"head_dim", "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"})
"""The size of a head follows from others, and nothing is rotated."""
_OF_DELTA_NETS = {
    "linear_head_dim": "head_dim", "linear_num_heads": "num_heads", "linear_conv_kernel_dim": "short_conv_kernel_size",
}  # fmt: skip
"""The reference's keys, and those of `linear_attn_config`, which go first."""


def _architecture() -> Architecture:
    from penstock.engine.models.kimi_linear import KIMI_LINEAR_LIKE

    return KIMI_LINEAR_LIKE


def _fields(raw: HFConfig) -> ConfigFields:
    own = {key: value for key, value in raw.items() if key not in _OTHER_NAMES and key not in _WITHOUT_EFFECT}
    own |= {_OTHER_NAMES[key]: value for key, value in raw.items() if key in _OTHER_NAMES}
    inner = mapping(raw, "linear_attn_config")
    own |= {key: inner[name] for key, name in _OF_DELTA_NETS.items() if name in inner}
    heads, dim, recurrent = integer(own, "linear_num_heads"), integer(own, "linear_head_dim"), _recurrent(own, inner)
    fields: ConfigFields = {
        **latent_fields(own, interleaved=False),
        "rope": STILL,
        "max_positions": integer(own, "max_position_embeddings"),
        "moe": corrected_sigmoids(
            own,
            experts=integer(own, "num_local_experts"),
            layers=sparse_by_type(own, count(own, "first_k_dense_replace") if "first_k_dense_replace" in own else 1),
            shared=integer(own, "n_shared_experts"),
        ),
    }
    if any(recurrent):
        fields["delta"] = DeltaConfig(
            layers=recurrent,
            k_heads=heads,
            v_heads=heads,
            k_dim=dim,
            v_dim=dim,
            conv=integer(own, "linear_conv_kernel_dim"),
            grouped=False,
            by_channel=True,
        )
    return fields


def _recurrent(raw: HFConfig, inner: HFConfig) -> tuple[bool, ...]:
    """What `layer_types` says, or two lists of layers counted from one, or every fourth but the first attends."""
    layers = layer_count(raw)
    if raw.get("layer_types") is not None:
        return recurrent_by_type(raw)
    if not {"full_attn_layers", "kda_layers"} <= inner.keys():
        return tuple(not index or index % _PERIOD != 0 for index in range(layers))
    lists = [inner["full_attn_layers"], inner["kda_layers"]]
    named = [entry for part in lists if isinstance(part, list | tuple) for entry in part]
    if any(type(entry) is not int for entry in named) or sorted(named) != list(range(1, layers + 1)):
        raise CheckpointError(
            f"linear_attn_config: full_attn_layers and kda_layers must name each of the layers from 1 to {layers} "
            f"once, found {lists!r:.80}"
        )
    return tuple(index + 1 in lists[1] for index in range(layers))


_EXPERT = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_BLOCK = re.compile(r"\.block_sparse_moe\.")
_MATRIX = re.compile(r"(\.experts\.\d+\.)(w[123])\.")
_FORGET = re.compile(r"\.self_attn\.(f_a_proj|f_b_proj|dt_bias|A_log)")


def own_name(name: str) -> str:
    """transformers writes feed-forwards of dense layers under the name of blocks of experts, too."""
    name = _BLOCK.sub(".mlp.", name)
    name = _MATRIX.sub(lambda found: f"{found[1]}{_EXPERT[found[2]]}.", name)
    return forget_gate_name(name)


def forget_gate_name(name: str) -> str:
    """Published files have no module of the gate that forgets."""
    return _FORGET.sub(r".self_attn.forget_gate.\1", name)


_NEEDED_IN_GGUF = (
    "attention.key_length_mla", "attention.kv_lora_rank", "attention.value_length_mla", "kda.head_dim",
    "rope.dimension_count", "ssm.conv_kernel",
)  # fmt: skip
_GGUF_TENSORS: Mapping[str, str] = {
    "ssm_beta": "self_attn.b_proj",
    "ssm_dt.bias": "self_attn.forget_gate.dt_bias",
    "ssm_f_a": "self_attn.forget_gate.f_a_proj",
    "ssm_f_b": "self_attn.forget_gate.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_norm": "self_attn.o_norm",
}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    head, rank, value, kda, rotary, conv = (keys.whole(name, 0) for name in _NEEDED_IN_GGUF)
    missing = [name for name in _NEEDED_IN_GGUF if not keys.whole(name, 0)]
    if missing:
        raise CheckpointError(f"{keys.architecture}: {', '.join(missing)} missing or 0; the file is damaged")
    if head <= rotary:
        raise CheckpointError(
            f"attention.key_length_mla is {head}, of which rope.dimension_count leaves nothing ({rotary}); the file is "
            "damaged"
        )
    # attention.value_length is config.json's head_dim, which says nothing; llama.cpp does not use it either.
    cached = keys.whole("attention.key_length", 0)
    if cached not in (0, rank + rotary):
        raise CheckpointError(f"attention.key_length is {cached}; latents make it {rank + rotary}")
    kv_heads, heads = keys.each("attention.head_count_kv", config["num_hidden_layers"]), config["num_attention_heads"]
    if not any(kv_heads) or max(kv_heads) > 1:
        raise CheckpointError(
            f"attention.head_count_kv must be 0 in delta nets, and 1 in some layers, found {kv_heads!r:.80}"
        )
    return {
        **corrected_from_gguf(keys),
        "norm_topk_prob": True,  # of which files say nothing
        "num_local_experts": keys.whole("expert_count", 0),
        "n_shared_experts": keys.whole("expert_shared_count", 0),
        "num_key_value_heads": heads,
        "kv_lora_rank": rank,
        "q_lora_rank": keys.whole("attention.q_lora_rank", 0) or None,
        "qk_nope_head_dim": head - rotary,
        "qk_rope_head_dim": rotary,
        "v_head_dim": value,
        "layer_types": ["full_attention" if one else "linear_attention" for one in kv_heads],
        "linear_head_dim": kda,
        "linear_num_heads": heads,
        "linear_conv_kernel_dim": conv,
    }


KIMI_LINEAR = Family(
    model_type="kimi_linear",
    class_name="KimiLinearForCausalLM",
    fields=_fields,
    reads=LATENT_KEYS
    | CORRECTED_KEYS
    | _OTHER_NAMES.keys()
    | _OF_DELTA_NETS.keys()
    | {
        "num_local_experts", "n_shared_experts", "mlp_layer_types", "first_k_dense_replace", "linear_attn_config",
    },
    limits={
        "hidden_act": SILU, "mla_use_nope": (True,), "moe_router_activation_func": ("sigmoid",),
        "moe_layer_freq": (1,), "use_grouped_topk": (True,),
    },
    gguf=GGUFFormat(
        architectures=("kimi-linear",),
        config=_from_gguf,
        reads=(CORRECTED_GGUF - {"expert_weights_norm"}) | {"attention.q_lora_rank", *_NEEDED_IN_GGUF},
        windowed=False,
        own_head_sizes=True,
        layer_sizes=True,
        delta_nets="by_channel",
        tensors={**LATENT_TENSORS, **_GGUF_TENSORS},
    ),
    names=LATENT_NAMES,
    own_name=own_name,
    architecture=_architecture,
)  # fmt: skip
