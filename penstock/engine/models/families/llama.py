"""Llama 2 and 3, SmolLM2."""

from __future__ import annotations

from penstock.engine.models.families.family import Family, GGUFFormat

LLAMA = Family(
    model_type="llama",
    class_name="LlamaForCausalLM",
    gguf=GGUFFormat(architectures=("llama",), interleaved_rope=True),
)
