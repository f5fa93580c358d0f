"""The metadata keys of a GGUF file's architecture: which are honoured, and which are refused unless they say nothing.

The reference is llama.cpp. Its keys that are not read here belong to other architectures; a file of ours may carry them
at the value that changes nothing (zero, false, empty, or one for a factor), and is refused otherwise. So is a key that
neither knows and that speaks of attention, positions or experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.engine.loading.keys import KeyRules
from penstock.engine.models.families import Family, GGUFKeys
from penstock.errors import CheckpointError

READ = frozenset(
    {
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.key_length_swa",
        "attention.scale", "attention.sliding_window", "attention.value_length", "attention.value_length_swa",
        "block_count", "context_length", "embedding_length", "embedding_length_out", "feed_forward_length",
        "rope.dimension_count", "rope.dimension_count_swa", "rope.freq_base", "rope.freq_base_swa", "rope.scale_linear",
        "rope.scaling.attn_factor", "rope.scaling.factor",
        "rope.scaling.original_context_length", "rope.scaling.type", "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_log_multiplier", "attention.temperature_scale",
    }
)  # fmt: skip
"""In every family; what a family reads beside them is in its descriptor."""

INERT = frozenset(
    {
        "attention.group_norm_epsilon", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon",
        "decoder_start_token_id", "pooling_type", "rope.scaling.finetuned", "tensor_data_layout", "vocab_size",
    }
)  # fmt: skip
"""An epsilon is that of norms which a family does not have; that of its own (`GGUFFormat.epsilon`) is read."""

_FACTORS = frozenset(
    {
        "attention.output_scale", "attention.value_scale", "embedding_scale", "expert_group_scale",
        "expert_weights_scale", "expert_group_count", "expert_group_used_count", "full_attention_interval",
        "interleave_moe_layer_step", "logit_scale", "moe_every_n_layers", "residual_scale",
    }
)  # fmt: skip
"""Keys of which one also says nothing."""

OTHERS = _FACTORS | frozenset(
    {
        "activation_sparsity_scale", "altup.active_idx", "altup.num_inputs", "attention.clamp_kqv",
        "attention.compress_ratios", "attention.compress_rope_freq_base", "attention.decay_lora_rank",
        "attention.gate_lora_rank", "attention.group_norm_groups", "attention.iclr_lora_rank",
        "attention.indexer.block_size", "attention.indexer.head_count", "attention.indexer.key_length",
        "attention.indexer.local_blocks", "attention.indexer.top_k", "attention.indexer.types",
        "attention.key_length_mla", "attention.key_length_mla_swa", "attention.kv_lora_rank",
        "attention.kv_lora_rank_swa", "attention.max_alibi_bias", "attention.output_group_count",
        "attention.output_lora_rank", "attention.q_lora_rank", "attention.recurrent_layers",
        "attention.relative_buckets_count", "attention.rope_pattern", "attention.shared_kv_layers",
        "attention.sliding_window_pattern", "attention.temperature_length", "attention.value_length_mla",
        "attention.value_length_mla_swa", "attention.value_residual_mix_lora_rank", "attn_logit_softcapping",
        "classifier.output_labels", "convnext.block_count", "convnext.embedding_length", "decoder_block_count",
        "embedding_length_per_layer_input", "expert_chunk_feed_forward_length", "expert_count",
        "expert_feed_forward_length", "expert_latent_length", "expert_shared_count",
        "expert_shared_feed_forward_length", "expert_used_count", "experts_per_group", "features_length",
        "final_logit_softcapping", "kda.head_dim", "leading_dense_block_count", "moe_latent_size",
        "n_deepstack_layers", "nextn_predict_layers", "posnet.block_count", "posnet.embedding_length",
        "rescale_every_n_layers", "rope.dimension_sections", "rope.scaling.alpha", "router_logit_softcapping",
        "shortconv.l_cache", "ssm.conv_kernel", "ssm.dt_b_c_rms", "ssm.group_count", "ssm.inner_size",
        "ssm.state_size", "ssm.time_step_rank", "swiglu_clamp_exp", "swiglu_clamp_shexp", "swin_norm",
        "time_decay_extra_dim", "time_mix_extra_dim", "token_shift_count", "use_parallel_residual", "wkv.head_size",
    }
)  # fmt: skip
"""llama.cpp's keys for architectures that are not run here."""

_SILENT: Mapping[str, tuple[int, ...]] = {key: (0, 1) if key in _FACTORS else (0,) for key in OTHERS}
"""The values of those keys that say nothing."""

_SPEAKING = ("attention.", "rope.", "expert", "ssm.", "wkv.")
LONGEST_LIST = 100_000
"""Of numbers in an architecture's keys: one per layer, or a few."""


def check_keys(where: str, family: Family, keys: GGUFKeys) -> None:
    """CheckpointError for a key of the file that would change what llama.cpp computes, and that is not honoured."""
    given = _given(keys)
    rules = KeyRules(
        reader=f"{family.model_type} models in GGUF files",
        read=READ | family.gguf.reads | {family.gguf.epsilon, family.gguf.other_epsilon},
        limited={
            "attention.causal": (True,),
            "expert_gating_func": (0, 1),  # softmax, or left to the architecture
            "expert_weights_norm": (True,),
            **_SILENT,
        },
        inert=INERT,
    )
    rules.check({key: 0 if key in OTHERS and _says_nothing(value) else value for key, value in given.items()}, where)
    for key, value in given.items():
        if not rules.knows(key) and key.startswith(_SPEAKING) and not _says_nothing(value):
            raise CheckpointError(
                f"{where}: {keys.architecture}.{key:.80} is {value!r:.80}, a key that is not known; what it changes "
                "cannot be applied"
            )


def _says_nothing(value: Any) -> bool:
    return not any(value) if isinstance(value, list) else not value


def _given(keys: GGUFKeys) -> Mapping[str, Any]:
    prefix = f"{keys.architecture}."
    given: dict[str, Any] = {}
    for key in keys.metadata:
        if key.startswith(prefix):
            value = keys.metadata[key]
            if isinstance(value, np.ndarray | list) and len(value) > LONGEST_LIST:
                raise CheckpointError(f"{key:.120} is a list of {len(value)} entries; the file is damaged")
            given[key.removeprefix(prefix)] = value.tolist() if isinstance(value, np.ndarray) else value
    return given


def require_same(where: str, keys: GGUFKeys, name: str, expected: float) -> None:
    """CheckpointError where the file has the key with another number than the one it must have here."""
    value = keys.number(name, expected)
    if abs(value - expected) > 1e-6 * abs(expected):
        raise CheckpointError(
            f"{where}: {keys.architecture}.{name} is {value:g}, which is not supported; supported: {expected:g}"
        )
