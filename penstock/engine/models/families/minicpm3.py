"""MiniCPM 3: DeepSeek V2's attention over latents, dense feed-forwards, and Granite's multipliers by other names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.deepseek import LATENT_KEYS, LATENT_NAMES, latent_architecture, latent_fields
from penstock.engine.models.families.deepseek_gguf import LATENT_TENSORS
from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    flag,
    integer,
    layer_count,
    number,
)
from penstock.engine.models.families.granite import multiplied
from penstock.errors import CheckpointError


def _fields(raw: HFConfig) -> ConfigFields:
    layers, hidden = layer_count(raw), integer(raw, "hidden_size")
    values = integer(raw, "v_head_dim", hidden // integer(raw, "num_attention_heads"))
    depth = 1.0 if raw.get("scale_depth") is None else number(raw, "scale_depth") / layers**0.5
    base = hidden if raw.get("dim_model_base") is None else number(raw, "dim_model_base")
    scales = multiplied(
        {
            **raw,
            "embedding_multiplier": raw["scale_emb"],
            "residual_multiplier": depth,
            "logits_scaling": hidden / base if base else 0.0,
            "attention_multiplier": 1.0,
        }
    )
    latents = latent_fields({**raw, "v_head_dim": values}, interleaved=False)
    return {**scales, **latents, "mlp_bias": flag(raw, "mlp_bias")}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    """Files leave the multipliers to the reader: there is one model."""
    rotary, head = config["head_dim"], keys.whole("attention.key_length", 0)
    narrow, rank = keys.whole("attention.q_lora_rank", 0), keys.whole("attention.kv_lora_rank", 0)
    heads = config["num_attention_heads"]
    if head <= rotary or not narrow or not rank or config["num_key_value_heads"] != heads:
        raise CheckpointError(
            f"{keys.architecture}: latents of {rank} and {narrow}, heads of {head} with {rotary} rotated, "
            f"{config['num_key_value_heads']} of {heads} with keys; the file is damaged"
        )
    return {
        "q_lora_rank": narrow,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": head - rotary,
        "qk_rope_head_dim": rotary,
        "v_head_dim": keys.whole("attention.value_length", 0) or config["hidden_size"] // heads,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }


MINICPM3 = Family(
    model_type="minicpm3",
    class_name="MiniCPM3ForCausalLM",
    fields=_fields,
    reads=LATENT_KEYS | {"dim_model_base", "mlp_bias", "scale_depth", "scale_emb"},
    limits={"hidden_act": SILU},
    gguf=GGUFFormat(
        architectures=("minicpm3",),
        config=_from_gguf,
        reads=frozenset({"attention.kv_lora_rank", "attention.q_lora_rank"}),
        windowed=False,
        own_head_sizes=True,
        tensors=LATENT_TENSORS,
    ),
    names=LATENT_NAMES,
    architecture=latent_architecture,
)
