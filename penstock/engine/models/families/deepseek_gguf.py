"""GGUF files of DeepSeek V2, V3 and R1, Kimi K2 and GLM-4.7-Flash (`deepseek2`), as llama.cpp's converter has written
them.

Older files describe heads as they are and keep the matrix that makes keys and values as one. Newer ones describe
attention in the space of the latents (one KV head), with the sizes of heads beside it, and keep the matrix in two parts
(`loading.gguf_names` puts them together). Files do not say whether they are V2 or V3: the function that scores experts
does, and V2 files from before that key existed have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import NEXTN_KEY, GGUFFormat, GGUFKeys, HFConfig, drafting_layers
from penstock.errors import CheckpointError

ARCHITECTURE = "deepseek2"
_SIGMOID = 2
"""Of `expert_gating_func`."""
LATENT_GGUF = frozenset({
    "attention.key_length_mla", "attention.kv_lora_rank", "attention.q_lora_rank", "attention.value_length_mla",
    "expert_count", "expert_feed_forward_length", "expert_gating_func", "expert_group_count",
    "expert_group_used_count", "expert_shared_count", "expert_used_count", "expert_weights_norm",
    "expert_weights_scale", "leading_dense_block_count",
})  # fmt: skip
LATENT_TENSORS: Mapping[str, str] = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}


def _scores_by_sigmoids(keys: GGUFKeys) -> bool:
    return keys.whole("expert_gating_func", 0) == _SIGMOID


def latent_from_gguf(keys: GGUFKeys, config: HFConfig) -> dict[str, Any]:
    """The keys of attention over latents, and of the experts beside it."""
    rank, rotary = keys.whole("attention.kv_lora_rank", 0), config["head_dim"]
    head, value = keys.whole("attention.key_length_mla", 0), keys.whole("attention.value_length_mla", 0)
    if bool(head) != bool(value):
        raise CheckpointError("attention.key_length_mla and attention.value_length_mla belong together")
    key_length, value_length = keys.whole("attention.key_length", 0), keys.whole("attention.value_length", 0)
    if not head:
        head, value = key_length, value_length
    elif key_length not in (0, rank + rotary) or value_length not in (0, rank):
        raise CheckpointError(
            f"cached keys and values are {key_length} and {value_length} wide; latents make them {rank + rotary} and "
            f"{rank}"
        )
    if not rank or not value or head <= rotary:
        raise CheckpointError(
            f"{keys.architecture}: latents of {rank}, heads of {head} with {rotary} rotated, values of {value}; the "
            "file is damaged"
        )
    kv_heads, heads = config["num_key_value_heads"], config["num_attention_heads"]
    if kv_heads not in (1, heads):
        raise CheckpointError(f"attention.head_count_kv is {kv_heads}; all {heads} heads share one latent")
    experts = keys.whole("expert_count", 0)
    return {
        "num_key_value_heads": heads,
        "kv_lora_rank": rank,
        "q_lora_rank": keys.whole("attention.q_lora_rank", 0) or None,
        "qk_nope_head_dim": head - rotary,
        "qk_rope_head_dim": rotary,
        "v_head_dim": value,
        "n_routed_experts": experts,
        "n_shared_experts": keys.whole("expert_shared_count", 0),
        "num_experts_per_tok": keys.whole("expert_used_count", 0),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length", 0) or config["intermediate_size"],
        "first_k_dense_replace": keys.whole("leading_dense_block_count", 0) if experts else config["num_hidden_layers"],
        "routed_scaling_factor": keys.number("expert_weights_scale", 0.0) or 1.0,
    }


def groups_from_gguf(keys: GGUFKeys) -> dict[str, int]:
    """Files from before these keys existed choose among all experts."""
    return {
        "n_group": keys.whole("expert_group_count", 0) or 1,
        "topk_group": keys.whole("expert_group_used_count", 0) or 1,
    }


def normalizes(keys: GGUFKeys) -> bool:
    value = keys("expert_weights_norm", False)
    if not isinstance(value, bool):
        raise CheckpointError(f"expert_weights_norm must be true or false, found {value!r:.80}")
    return value


def _v2(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    if keys.whole("expert_gating_func", 0) not in (0, 1):
        raise CheckpointError(
            f"expert_gating_func is {keys('expert_gating_func')}; supported: 1 (softmax), 2 (sigmoid)"
        )
    if normalizes(keys):
        raise CheckpointError("expert_weights_norm: DeepSeek V2 does not normalize the weights of experts")
    groups = groups_from_gguf(keys)
    method = "group_limited_greedy" if groups["n_group"] > 1 else "greedy"
    return {**latent_from_gguf(keys, config), **groups, "topk_method": method, "norm_topk_prob": False}


def v3_from_gguf(keys: GGUFKeys, config: HFConfig) -> dict[str, Any]:
    # llama.cpp's converter leaves the layer that drafts out of DeepSeek's files, and writes that of GLM-4.7-Flash.
    layers = drafting_layers(keys, config)
    shared = latent_from_gguf(keys, {**config, **layers})
    return {**layers, **shared, **groups_from_gguf(keys), "norm_topk_prob": normalizes(keys), "rope_interleave": True}


V2_FORMAT = GGUFFormat(
    architectures=(ARCHITECTURE,),
    config=_v2,
    reads=LATENT_GGUF,
    windowed=False,
    own_head_sizes=True,
    tensors=LATENT_TENSORS,
)
V3_FORMAT = GGUFFormat(
    architectures=(ARCHITECTURE,),
    applies=_scores_by_sigmoids,
    config=v3_from_gguf,
    reads=LATENT_GGUF | {NEXTN_KEY},
    windowed=False,
    own_head_sizes=True,
    tensors=LATENT_TENSORS,
)
