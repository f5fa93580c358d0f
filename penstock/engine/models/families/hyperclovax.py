"""HyperCLOVA X SEED Think: Granite's multipliers, with norms behind attention and feed-forward too; logits are
multiplied where Granite divides them. What layers add is multiplied by the gains of those norms."""

from __future__ import annotations

from penstock.engine.models.families.family import ConfigFields, Family, GGUFFormat, HFConfig, llama_fields, number
from penstock.engine.models.families.granite import MULTIPLIERS
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.errors import CheckpointError


def _fields(raw: HFConfig) -> ConfigFields:
    scaling, embedding = number(raw, "logits_scaling"), number(raw, "embedding_multiplier")
    if scaling == 0:
        raise CheckpointError("logits_scaling is 0: all tokens would be equally likely")
    fields: ConfigFields = {
        **llama_fields(raw),
        "embedding_scale": embedding,
        "virtual_scale": embedding,
        "out_norm_scale": number(raw, "residual_multiplier"),
        "logit_scale": scaling,
    }
    if raw.get("attention_multiplier") is not None:
        fields["attention_scale"] = number(raw, "attention_multiplier")
    return fields


HYPERCLOVAX = Family(
    model_type="hyperclovax",
    class_name="HyperCLOVAXForCausalLM",
    fields=_fields,
    reads=MULTIPLIERS | {"attention_bias", "mlp_bias"},
    limits={"hidden_act": ("silu", "swish"), "use_post_norm": (True,)},
    names=TensorNames(mixer_out_norm="post_norm1", feed_forward_out_norm="post_norm2"),
    gguf=GGUFFormat(architectures=()),
)
