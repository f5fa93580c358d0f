"""The registry of supported families."""

from __future__ import annotations

from functools import cache
from typing import Any

from penstock.engine.loading.keys import ABSENT, KeyRules
from penstock.engine.models.families.afmoe import AFMOE
from penstock.engine.models.families.apertus import APERTUS
from penstock.engine.models.families.arcee import ARCEE
from penstock.engine.models.families.axk1 import AXK1
from penstock.engine.models.families.axk2 import AXK2
from penstock.engine.models.families.bamba import BAMBA
from penstock.engine.models.families.cohere import COHERE
from penstock.engine.models.families.cohere2 import COHERE2
from penstock.engine.models.families.cohere2_moe import COHERE2_MOE
from penstock.engine.models.families.config_keys import INERT, READ, reference_of
from penstock.engine.models.families.cwm import CWM
from penstock.engine.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2
from penstock.engine.models.families.deepseek_sparse import DEEPSEEK_V32, GLM_MOE_DSA
from penstock.engine.models.families.deepseek_v4 import DEEPSEEK_V4
from penstock.engine.models.families.dots1 import DOTS1
from penstock.engine.models.families.ernie4_5 import ERNIE4_5, ERNIE4_5_MOE
from penstock.engine.models.families.exaone4 import EXAONE4
from penstock.engine.models.families.exaone_moe import EXAONE_MOE
from penstock.engine.models.families.falcon_h1 import FALCON_H1
from penstock.engine.models.families.family import (
    ConfigFields,
    Family,
    GGUFKeys,
    HFConfig,
    flag,
    integer,
    layer_count,
    number,
    short_decimal,
    windows_by_type,
)
from penstock.engine.models.families.flex_olmo import FLEX_OLMO
from penstock.engine.models.families.gemma import GEMMA
from penstock.engine.models.families.gemma2 import GEMMA2
from penstock.engine.models.families.gemma3 import GEMMA3
from penstock.engine.models.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from penstock.engine.models.families.glm import GLM
from penstock.engine.models.families.glm4 import GLM4
from penstock.engine.models.families.glm4_moe import GLM4_MOE
from penstock.engine.models.families.glm4_moe_lite import GLM4_MOE_LITE
from penstock.engine.models.families.glm5_next import GLM5_NEXT
from penstock.engine.models.families.gpt_oss import GPT_OSS
from penstock.engine.models.families.granite import GRANITE
from penstock.engine.models.families.granite_moe import GRANITE_MOE, GRANITE_MOE_HYBRID, GRANITE_MOE_SHARED
from penstock.engine.models.families.granite_swa import GRANITE_MOE_SWA, GRANITE_SWA
from penstock.engine.models.families.helium import HELIUM
from penstock.engine.models.families.hrm_text import HRM_TEXT
from penstock.engine.models.families.hunyuan import HUNYUAN, HUNYUAN_MOE
from penstock.engine.models.families.hy_v3 import HY_V3
from penstock.engine.models.families.hy_v4 import HY_V4
from penstock.engine.models.families.hyperclovax import HYPERCLOVAX
from penstock.engine.models.families.jais2 import JAIS2
from penstock.engine.models.families.kimi_linear import KIMI_LINEAR
from penstock.engine.models.families.laguna import LAGUNA
from penstock.engine.models.families.lfm2 import LFM2, LFM2_MOE
from penstock.engine.models.families.llama import LLAMA
from penstock.engine.models.families.llama4 import LLAMA4
from penstock.engine.models.families.mamba2 import MAMBA2
from penstock.engine.models.families.mellum import MELLUM
from penstock.engine.models.families.mimo_v2_flash import MIMO_V2_FLASH
from penstock.engine.models.families.minicpm3 import MINICPM3
from penstock.engine.models.families.minimax_m2 import MINIMAX_M2
from penstock.engine.models.families.minimax_m3 import MINIMAX_M3
from penstock.engine.models.families.ministral import MINISTRAL
from penstock.engine.models.families.ministral3 import MINISTRAL3
from penstock.engine.models.families.mistral import MISTRAL
from penstock.engine.models.families.mistral4 import MISTRAL4
from penstock.engine.models.families.mistral_large4 import MISTRAL_LARGE4
from penstock.engine.models.families.mixtral import MIXTRAL
from penstock.engine.models.families.muse_glimmer import MUSE_GLIMMER
from penstock.engine.models.families.muse_spark import MUSE_SPARK
from penstock.engine.models.families.nemotron import NEMOTRON
from penstock.engine.models.families.nemotron_h import NEMOTRON_H
from penstock.engine.models.families.olmo import OLMO
from penstock.engine.models.families.olmo2 import OLMO2
from penstock.engine.models.families.olmo3 import OLMO3
from penstock.engine.models.families.olmoe import OLMOE
from penstock.engine.models.families.phi import PHI
from penstock.engine.models.families.phi3 import PHI3
from penstock.engine.models.families.qwen2 import QWEN2
from penstock.engine.models.families.qwen2_moe import QWEN2_MOE
from penstock.engine.models.families.qwen3 import QWEN3
from penstock.engine.models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from penstock.engine.models.families.qwen3_moe import QWEN3_MOE
from penstock.engine.models.families.qwen3_next import QWEN3_NEXT
from penstock.engine.models.families.qwen4_exp import QWEN4_EXP
from penstock.engine.models.families.seed_oss import SEED_OSS
from penstock.engine.models.families.smollm3 import SMOLLM3
from penstock.engine.models.families.solar_open import SOLAR_OPEN
from penstock.engine.models.families.stablelm import STABLELM
from penstock.engine.models.families.starcoder2 import STARCODER2
from penstock.engine.models.families.step3p5 import STEP3P5
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.families.text_types import TEXT_TYPES
from penstock.engine.models.families.youtu import YOUTU
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.reference_keys import CLASSES, SHARED
from penstock.engine.models.rope import read_rope
from penstock.engine.models.transformers.config import read_library_config
from penstock.engine.models.wrappers import WRAPPERS, Wrapper
from penstock.errors import CheckpointError

__all__ = [
    "FAMILIES",
    "TEXT_TYPES",
    "WRAPPERS",
    "ConfigFields",
    "Family",
    "GGUFKeys",
    "HFConfig",
    "TensorNames",
    "decoder_type",
    "family_of",
    "family_of_gguf",
    "gguf_architectures",
    "is_linear",
    "read_config",
    "short_decimal",
    "text_config",
]

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        MIXTRAL,
        QWEN2,
        QWEN3,
        QWEN3_MOE,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        GEMMA,
        GEMMA2,
        GEMMA3,
        PHI3,
        GPT_OSS,
        GRANITE,
        MINISTRAL,
        MINISTRAL3,
        OLMO2,
        OLMO3,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        KIMI_K2,
        DEEPSEEK_V32,
        GLM_MOE_DSA,
        DEEPSEEK_V4,
        OLMOE,
        QWEN2_MOE,
        GRANITE_MOE,
        GRANITE_MOE_SHARED,
        GRANITE_MOE_HYBRID,
        BAMBA,
        FALCON_H1,
        NEMOTRON_H,
        MAMBA2,
        SMOLLM3,
        COHERE,
        COHERE2,
        GLM4,
        GLM4_MOE,
        LLAMA4,
        EXAONE4,
        SEED_OSS,
        ERNIE4_5,
        ERNIE4_5_MOE,
        HUNYUAN,
        HUNYUAN_MOE,
        MINIMAX_M2,
        GLM4_MOE_LITE,
        EXAONE_MOE,
        DOTS1,
        SOLAR_OPEN,
        CWM,
        ARCEE,
        FLEX_OLMO,
        MELLUM,
        LFM2,
        LFM2_MOE,
        KIMI_LINEAR,
        GLM,
        STABLELM,
        STARCODER2,
        OLMO,
        PHI,
        HELIUM,
        HYPERCLOVAX,
        JAIS2,
        NEMOTRON,
        APERTUS,
        HY_V3,
        YOUTU,
        GRANITE_SWA,
        GRANITE_MOE_SWA,
        AFMOE,
        AXK1,
        MINICPM3,
        COHERE2_MOE,
        GEMMA4,
        GEMMA4_UNIFIED,
        MISTRAL4,
        QWEN4_EXP,
        AXK2,
        HY_V4,
        HRM_TEXT,
        MIMO_V2_FLASH,
        LAGUNA,
        MINIMAX_M3,
        STEP3P5,
        MISTRAL_LARGE4,
        MUSE_GLIMMER,
        MUSE_SPARK,
        GLM5_NEXT,
    )
}
"""By `model_type`."""


def text_config(raw: HFConfig) -> HFConfig:
    """The decoder's keys, in a family's terms: those of a multimodal model are one level down, and only its decoder is
    run. Where no family has the decoder, the keys as they are."""
    wrapper = WRAPPERS.get(str(raw.get("model_type")))
    if wrapper is None:
        return raw
    given = wrapper.keys_of(raw)
    if given is None:
        raise CheckpointError(
            f"config.json: a {wrapper.model_type} model must have {wrapper.key}, with its decoder's keys"
        )
    if wrapper.decoder in WRAPPERS:
        _beside_text(wrapper).check(raw)
        return text_config({**given, "model_type": wrapper.decoder})
    kind = decoder_type(raw)
    own = TEXT_TYPES.get(kind)
    family = FAMILIES.get(own.family if own else kind)
    if family is None:
        return raw
    if given is not raw:
        _beside_text(wrapper).check(raw)
    tied = _tied(wrapper, raw, given, kind)
    keys = own.keys(family, _without(given, wrapper)) if own else {**given, "model_type": family.model_type}
    return {**keys, "tie_word_embeddings": tied}


def decoder_type(raw: HFConfig) -> str:
    """What the decoder of a model is called, where the reference looks for it."""
    wrapper = WRAPPERS.get(str(raw.get("model_type")))
    if wrapper is None:
        return str(raw.get("model_type"))
    given = wrapper.keys_of(raw) or {}
    if wrapper.decoder in WRAPPERS:
        return decoder_type({**given, "model_type": wrapper.decoder})
    kind = wrapper.decoder if wrapper.fixed else str(given.get("model_type", wrapper.decoder))
    return wrapper.renamed.get(kind, kind)


def _without(given: HFConfig, wrapper: Wrapper) -> HFConfig:
    """Without the wrapper's own keys, where the decoder's stand beside them."""
    own = CLASSES[wrapper.model_type].keys() - READ
    return {key: value for key, value in given.items() if key not in own} if wrapper.flat else given


def _tied(wrapper: Wrapper, raw: HFConfig, given: HFConfig, kind: str) -> Any:
    """Whether the head is the embedding, where a checkpoint has none."""
    default = CLASSES[wrapper.model_type].get("tie_word_embeddings", False)
    inner = given.get("tie_word_embeddings", reference_of(kind).get("tie_word_embeddings", False))
    if wrapper.tied_by == "decoder":
        return inner
    own = raw.get(wrapper.tied_key, raw.get("tie_word_embeddings", default))
    if own is None or (wrapper.tied_by == "either" and own is False):
        return False if inner is ABSENT else inner
    return own


def _beside_text(wrapper: Wrapper) -> KeyRules:
    """For what stands beside the decoder's keys."""
    known = CLASSES[wrapper.model_type]
    return KeyRules(
        reader=f"decoders of {wrapper.model_type} models",
        reference={**SHARED, **known},
        read={"model_type", wrapper.key, *wrapper.older_keys, "tie_word_embeddings", "quantization_config"},
        limited={"is_causal": (True,), "per_layer_config": (None, {})},
        inert=INERT | known.keys(),  # images: the text's decoder does not see them
    )


def family_of(model_type: str) -> Family:
    """The family of a configuration; one that has none is refused."""
    family = FAMILIES.get(model_type)
    if family is None:
        raise CheckpointError(
            f"model_type {model_type or '(missing)'!r:.80} is not supported; supported families: {', '.join(FAMILIES)}"
        )
    return family


def read_config(raw: HFConfig) -> ModelConfig:
    """Read Hugging Face `config.json` keys; a model that cannot be run exactly is refused, never approximated."""
    wrapper = WRAPPERS.get(str(raw.get("model_type")))
    if wrapper is not None and wrapper.refused:
        raise CheckpointError(f"{wrapper.model_type} models are not run: {wrapper.refused}")
    raw = text_config(raw)
    model_type = raw.get("model_type", "")
    if not isinstance(model_type, str):
        raise CheckpointError(f"config key 'model_type' must be a name, found {model_type!r:.80}")
    if model_type not in FAMILIES:
        return read_library_config(raw, ", ".join(FAMILIES))
    family = family_of(model_type)
    raw = family.checked(raw)
    fields = family.fields(raw)
    hidden = integer(raw, "hidden_size")
    layers = fields["num_layers"] = fields.get("num_layers") or layer_count(raw)
    heads = fields["num_heads"] = fields.get("num_heads") or integer(raw, "num_attention_heads")
    kv_heads = fields.setdefault("num_kv_heads", integer(raw, "num_key_value_heads", heads))
    head_dim = fields.setdefault("head_dim", integer(raw, "head_dim", hidden // heads))
    if heads % kv_heads or (head_dim % 2 and "latent" not in fields) or head_dim > 1 << 16:
        raise CheckpointError(f"{heads} heads over {kv_heads} KV heads of size {head_dim} cannot be run")
    windows = fields.setdefault("windows", (None,) * layers)
    others = {"delta", "mamba", "short_conv", "compression", "sparse_blocks"}
    ordinary = not fields.keys() & others and not fields.get("chunked")
    ordinary = ordinary and ("latent" not in fields or fields["latent"].index is None)
    if ordinary and windows_by_type(raw, next(filter(None, windows), None)) not in (None, windows):
        raise CheckpointError(f"layer_types of {family.model_type} models must say what sliding_window says")
    fields.setdefault("activation", family.activation)
    fields.setdefault("attention_scale", head_dim**-0.5)
    if "ffn_size" not in fields:
        moe = fields.get("moe")
        fields["ffn_size"] = integer(raw, "intermediate_size", None if moe is None else moe.ffn_size)
    if "max_positions" not in fields:
        fields["max_positions"] = integer(raw, "max_position_embeddings")
    if "rms_eps" not in fields:
        fields["rms_eps"] = number(raw, "rms_norm_eps")
    if "tied_embeddings" not in fields:
        fields["tied_embeddings"] = flag(raw, "tie_word_embeddings")
    if "rope" not in fields:
        fields["rope"] = read_rope(raw)
    if wrapper is not None and wrapper.own_head:
        fields |= {"logit_scale": 1.0, "logit_softcap": None}
    return ModelConfig(
        family=family.model_type,
        hidden_size=hidden,
        vocab_size=integer(raw, "vocab_size"),
        sandwich_norms=bool(family.names.mixer_out_norm or family.names.feed_forward_out_norm),
        norm_offset=family.norm_offset,
        final_norm_offset=family.norm_offset if family.final_norm_offset is None else family.final_norm_offset,
        **fields,
    )


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
