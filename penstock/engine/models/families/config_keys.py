"""What decoders do with the keys of a `config.json`, and the defaults of keys that it leaves out.

Both come from the reference's configuration class (`models.reference_keys`). What is declared here holds for all
families; a descriptor adds its own keys, and the values that it can honour.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from penstock.engine.loading.keys import ABSENT, KeyRules
from penstock.engine.models.reference_keys import CLASSES, GENERATION, SHARED

READ = frozenset({
    "model_type", "quantization_config", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "layer_types",
    "tie_word_embeddings", "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor",
    "original_max_position_embeddings",
})  # fmt: skip
"""Keys of every decoder."""

LIMITED: Mapping[str, Collection[Any]] = {
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_chunk_size": (None,),
    "sliding_window": (None,),
    "num_kv_shared_layers": (None, 0),
    "per_layer_config": (None, {}),
    "text_config": (None,),
    "decoder": (None,),
    "generator": (None,),
    "use_bidirectional_attention": (None, False),
}
"""Keys that ask for something that no family, or only a family that says so, can do."""

NAMES = frozenset({
    "architectures", "name_or_path", "_name_or_path", "_commit_hash", "transformers_version", "auto_map", "dtype",
    "torch_dtype", "tokenizer_class", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id",
    "mask_token_id", "unk_token_id", "eod_token_id", "decoder_start_token_id", "prefix", "model_name",
    "unsloth_version",
})  # fmt: skip
"""Names, versions and token ids. The weights' type is the tensors' own; token ids matter to who generates."""

TRAINING = frozenset({
    "initializer_range", "attention_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob",
    "classifier_dropout", "resid_pdrop", "embd_pdrop", "router_aux_loss_coef", "router_jitter_noise",
    "gradient_checkpointing", "finetuning_task", "task_specific_params", "problem_type", "tf_legacy_loss",
    "embedding_initializer_range", "use_bfloat16", "aux_loss_alpha", "seq_aux", "ep_size", "residual_dropout",
})  # fmt: skip
"""Used while training, or by the heads of fine-tuned classifiers, which decoders do not have."""

EXECUTION = frozenset({
    "use_cache", "output_hidden_states", "output_attentions", "_output_attentions", "output_router_logits",
    "return_dict", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
    "experts_implementation", "_experts_implementation", "chunk_size_feed_forward", "pretraining_tp", "torchscript",
    "base_model_tp_plan", "base_model_pp_plan", "base_model_ep_plan", "pruned_heads",
})  # fmt: skip
"""How the reference computes or what else it returns; the logits stay the same."""

ELSEWHERE = frozenset({
    "use_sliding_window", "max_window_layers", "sliding_window_pattern", "_sliding_window_pattern",
    "query_pre_attn_scalar", "cache_implementation", "id2label", "label2id", "num_labels", "experts_per_token",
    "initial_context_length",
})  # fmt: skip
"""Keys of other families and of classifiers, common in files whose class does not have them. No need to report them."""

INERT = NAMES | TRAINING | EXECUTION | ELSEWHERE | frozenset(GENERATION)


def reference_of(model_type: str) -> Mapping[str, Any]:
    """The keys of the reference's class and their defaults; those of Llama for a family that has no class there."""
    return {**SHARED, **CLASSES.get(model_type, CLASSES["llama"])}


def decoder_rules(
    model_type: str, reads: Collection[str], limits: Mapping[str, Collection[Any]], reference: str
) -> KeyRules:
    """`reads`, `limits`: the family's own; they take precedence over those of all families. `reference`: whose class
    reads such files."""
    return KeyRules(
        reader=f"{model_type} models",
        reference=reference_of(reference),
        read=(READ | frozenset(reads)) - limits.keys(),
        limited={**{key: values for key, values in LIMITED.items() if key not in reads}, **limits},
        inert=INERT - limits.keys(),
    )


def with_defaults(model_type: str, given: Mapping[str, Any], reads: Collection[str]) -> dict[str, Any]:
    """The keys that the reference would see: its defaults, and what `given` says. What only `given` knows of is left
    out, so that nothing can be read that the reference ignores; `reads`: other names of keys that are kept."""
    reference = reference_of(model_type)
    defaults = {key: default for key, default in reference.items() if default is not ABSENT}
    return defaults | {key: value for key, value in given.items() if key in reference or key in reads}
