"""Arcee Foundation Models (AFM-4.5B): Llama with feed-forwards of squared ReLUs, without a gate."""

from __future__ import annotations

from penstock.engine.models.families.family import ConfigFields, Family, GGUFFormat, HFConfig, llama_fields


def _fields(raw: HFConfig) -> ConfigFields:
    return {**llama_fields(raw), "activation": "relu2"}


ARCEE = Family(
    model_type="arcee",
    class_name="ArceeForCausalLM",
    fields=_fields,
    hidden_act="relu2",
    limits={"hidden_act": ("relu2",)},
    gguf=GGUFFormat(architectures=("arcee",), interleaved_rope=True, windowed=False),
)
