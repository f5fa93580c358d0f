"""Keys of `adapter_config.json` for the kinds of adapters other than LoRA. The reference is peft's class for each."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from penstock.engine.adapters import peft_config
from penstock.engine.loading.keys import KeyRules

_INERT = (
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "layers_pattern", "runtime_config",
)  # fmt: skip
_READ = (
    "peft_type", "target_modules", "exclude_modules", "layers_to_transform", "modules_to_save", "fan_in_fan_out",
    "trainable_token_indices",
)  # fmt: skip
_PATTERNS = ("rank_pattern", "alpha_pattern")


def _rules(title: str, read: Collection[str] = (), inert: Collection[str] = (), **limited: Any) -> KeyRules:
    return KeyRules(
        reader=f"{title} adapters", read={*_READ, *read}, limited=limited, inert={*_INERT, *inert}, strict=True
    )


ADALORA = KeyRules(
    reader="AdaLoRA adapters",
    reference={
        **peft_config.RULES.reference,
        "use_rslora": False,
        "use_dora": False,
        "lora_bias": False,
        "target_parameters": None,
        "alpha_pattern": {},
        "ensure_weight_tying": False,
    },
    read={*_READ, "init_r", "lora_alpha", "rank_pattern"},
    limited={
        "bias": ("none", "all", "lora_only"),
        "use_bdlora": (None, False, {}),
        "init_lora_weights": (True, False),
    },
    # The target rank and what follows say how ranks were chosen in training; peft gives every module `init_r`, not `r`.
    inert={
        *_INERT, *peft_config.RULES.inert, "r", "target_r", "tinit", "tfinal", "deltaT", "beta1", "beta2",
        "orth_reg_weight", "total_step",
    },
    strict=True,
)  # fmt: skip
VERA = _rules(
    "VeRA", ("r", "projection_prng_key", "save_projection"), ("vera_dropout", "d_initial", "init_weights"),
    bias=("none", "all", "vera_only"),
)  # fmt: skip
LOHA = _rules(
    "LoHa", ("r", "alpha", *_PATTERNS), ("rank_dropout", "module_dropout", "init_weights", "use_effective_conv2d")
)
LOKR = _rules(
    "LoKr",
    ("r", "alpha", *_PATTERNS),
    # How matrices were taken apart is in their shapes.
    (
        "rank_dropout", "module_dropout", "rank_dropout_scale", "init_weights", "use_effective_conv2d",
        "decompose_both", "decompose_factor",
    ),
)  # fmt: skip
MISS = _rules(
    "MiSS", ("r", "mini_r"), ("miss_dropout",), bias=("none", "all", "MiSS_only"), init_weights=(True, False, "mini")
)
DELORA = _rules(
    "DeLoRA", ("r", "rank_pattern"), ("delora_lambda", "lambda_pattern", "module_dropout", "init_weights"),
    bias=("none", "all", "delora_only"),
)  # fmt: skip
VBLORA = _rules(
    "VB-LoRA",
    ("r", "topk"),
    (
        "num_vectors", "vector_length", "save_only_topk_weights", "vblora_dropout", "init_vector_bank_bound",
        "init_logits_std",
    ),
    bias=("none", "all", "vblora_only"),
)  # fmt: skip
# The size of blocks, and how many there are, is in the shapes.
OFT = _rules(
    "OFT",
    ("coft", "eps", "block_share", "use_cayley_neumann", "num_cayley_neumann_terms"),
    ("r", "oft_block_size", "module_dropout", "init_weights"),
    bias=("none", "all", "oft_only"),
)
# So it is here, with the number of factors.
BOFT = _rules(
    "BOFT",
    (),
    ("boft_block_size", "boft_block_num", "boft_n_butterfly_factor", "boft_dropout", "init_weights"),
    bias=("none", "all", "boft_only"),
)
# Whether a vector of IA3 multiplies inputs is in its shape.
IA3 = _rules("IA3", (), ("feedforward_modules", "init_ia3_weights"))
BEFT = _rules("BEFT", (), ("init_weights",))
LN_TUNING = _rules("LN tuning")


def _prompt_rules(title: str, *inert: str, read: Collection[str] = ()) -> KeyRules:
    """Of virtual tokens: peft's `PromptLearningConfig` has nothing of linears."""
    return KeyRules(
        reader=f"{title} adapters",
        read={"peft_type", "num_virtual_tokens", "token_dim", *read},
        limited={"num_transformer_submodules": (None, 1), "modules_to_save": (None, [])},
        # How the rows came to be: they are stored as they are used.
        inert={*_INERT, "num_attention_heads", "num_layers", *inert},
        strict=True,
    )


PROMPT_TUNING = _prompt_rules(
    "prompt tuning", "prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs"
)
P_TUNING = _prompt_rules(
    "p-tuning", "encoder_reparameterization_type", "encoder_hidden_size", "encoder_num_layers", "encoder_dropout"
)
PREFIX_TUNING = _prompt_rules("prefix tuning", "init_weights", "encoder_hidden_size", "prefix_projection")
CARTRIDGE = _prompt_rules("cartridge", "num_frozen_tokens")
CPT = _prompt_rules(
    "CPT", "cpt_token_ids", "cpt_mask", "cpt_tokens_type_mask", "opt_weighted_loss_type", "opt_loss_decay_factor",
    "opt_projection_epsilon", "opt_projection_format_epsilon", "tokenizer_name_or_path",
)  # fmt: skip
MULTITASK_PROMPT_TUNING = _prompt_rules(
    "multitask prompt tuning", "prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path",
    "tokenizer_kwargs", "prompt_tuning_init_state_dict_path", "prompt_tuning_init_task", "num_ranks",
    read=("num_tasks", "task_id"),
)  # fmt: skip
ADAPTION_PROMPT = KeyRules(
    reader="adaption prompt adapters",
    read={"peft_type", "adapter_len", "adapter_layers"},
    # Which modules are wrapped is in the names of tensors.
    inert={*_INERT, "target_modules"},
    strict=True,
)
TRAINABLE_TOKENS = _rules("trainable token", ("token_indices",), ("init_weights",))
