"""The registry of supported families."""

from __future__ import annotations

from functools import cache

from penstock.engine.models.families.family import (
    ConfigFields,
    Family,
    GGUFKeys,
    HFConfig,
    MoeConfig,
    TensorNames,
    integer,
    short_decimal,
)
from penstock.engine.models.families.gemma import GEMMA
from penstock.engine.models.families.gemma2 import GEMMA2
from penstock.engine.models.families.gemma3 import GEMMA3
from penstock.engine.models.families.llama import LLAMA
from penstock.engine.models.families.mistral import MISTRAL
from penstock.engine.models.families.mixtral import MIXTRAL
from penstock.engine.models.families.phi3 import PHI3
from penstock.engine.models.families.qwen2 import QWEN2
from penstock.engine.models.families.qwen3 import QWEN3
from penstock.engine.models.families.qwen3_moe import QWEN3_MOE
from penstock.errors import CheckpointError

__all__ = [
    "FAMILIES",
    "ConfigFields",
    "Family",
    "GGUFKeys",
    "HFConfig",
    "MoeConfig",
    "TensorNames",
    "family_of",
    "family_of_gguf",
    "gguf_architectures",
    "integer",
    "is_linear",
    "short_decimal",
    "text_config",
]

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA, GEMMA2, GEMMA3, PHI3)
}
"""By `model_type`."""


def text_config(raw: HFConfig) -> HFConfig:
    """The decoder's keys: those of a multimodal model are one level down, and only its decoder is run."""
    inner = raw.get("text_config")
    for family in FAMILIES.values():
        if inner and family.multimodal_type and raw.get("model_type") == family.multimodal_type:
            return {"model_type": family.model_type, **inner}
    return raw


def family_of(model_type: str) -> Family:
    """The family of a configuration; one that cannot be run is refused."""
    family = FAMILIES.get(model_type)
    if family is None:
        raise CheckpointError(
            f"model_type {model_type or '(missing)'!r} is not supported; supported families: {', '.join(FAMILIES)}"
        )
    return family


def gguf_architectures() -> list[str]:
    """Supported values of `general.architecture`."""
    return sorted({name for family in FAMILIES.values() for name in family.gguf.architectures})


def family_of_gguf(keys: GGUFKeys) -> Family | None:
    """The family of a GGUF file, None where it is not supported. More than one family may share an architecture: the
    last in the registry that applies is meant, since it is the more specific one."""
    found = [family for family in FAMILIES.values() if keys.architecture in family.gguf.architectures]
    applying = [family for family in found if family.gguf.applies is not None and family.gguf.applies(keys)]
    others = [family for family in found if family.gguf.applies is None]
    return next(reversed(applying or others), None)


def is_linear(name: str) -> bool:
    """Whether a tensor is a matrix of a layer, which can be quantized; embeddings, heads, norms and routers are not."""
    stem, _, kind = name.rpartition(".")
    return kind == "weight" and stem.rpartition(".")[2] in _linear_names()


@cache
def _linear_names() -> frozenset[str]:
    return frozenset().union(*(family.names.linears for family in FAMILIES.values()))
