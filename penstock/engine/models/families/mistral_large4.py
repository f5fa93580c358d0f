"""Mistral Large 4: attention over latents to tokens that an indexer chooses, as GLM-5's, with queries made at once and
sharper the later they stand, head by head; layers without rotary embedding, whose latents are narrower; layers that
attend to the latents of others; rotary frequencies with learned factors; experts as Mistral Small 4's.

Layers of the published draft head (`mtp_dspark.*`), which the reference does not describe, are not read.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.engine.models.attention_config import IndexConfig
from penstock.engine.models.families.deepseek import latent_fields
from penstock.engine.models.families.deepseek_sparse import own_indexers
from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    count,
    integer,
    layer_count,
    number,
)
from penstock.engine.models.families.sigmoid_experts import sparse_by_type
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.moe_config import MoeConfig
from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from penstock.engine.models.architecture import Architecture

_USUAL: HFConfig = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}
"""The rope parameters of a file without any."""
_KEYS = frozenset({
    "attention_bias", "final_logit_softcapping", "first_k_dense_replace", "index_head_dim", "index_n_heads",
    "index_skip_topk_offset", "index_topk", "index_topk_freq", "index_topk_pattern", "indexer_types",
    "kv_lora_rank", "kv_source_layers", "mlp_layer_types", "moe_intermediate_size", "n_group", "n_routed_experts",
    "n_shared_experts", "no_rope_layer_interval", "no_rope_layers", "num_experts", "num_experts_per_tok",
    "num_local_experts", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "routed_scaling_factor", "topk_group",
    "v_head_dim",
})  # fmt: skip
_KIND = "indexed_attention"
_LAYER = r"((?:^|\.)layers\.\d+\.)"
_PUBLISHED = tuple(
    (re.compile(pattern), target)
    for pattern, target in (
        (r"^tok_embeddings\.", "embed_tokens."),
        (r"^output\.", "lm_head."),
        (r"^lerope\.alpha$", "rotary_emb.alpha"),
        (_LAYER + r"attention_norm\.", r"\1input_layernorm."),
        (_LAYER + r"ffn_norm\.", r"\1post_attention_layernorm."),
        (_LAYER + r"attention\.", r"\1self_attn."),
        (_LAYER + r"feed_forward\.", r"\1mlp."),
        (_LAYER + r"(gate|experts|shared_experts)\.", r"\1mlp.\2."),
        (r"\.self_attn\.wq\.", ".self_attn.q_proj."),
        (r"\.self_attn\.wo\.", ".self_attn.o_proj."),
        (r"\.wkv_a_with_mqa\.", ".kv_a_proj_with_mqa."),
        (r"\.kv_a_norm\.", ".kv_a_layernorm."),
        (r"\.wkv_b\.", ".kv_b_proj."),
        (r"\.ssmax_scaling\.s$", ".softmax_scaling.scale"),
        (r"\.ssmax_scaling\.b$", ".softmax_scaling.bias"),
        (r"(\.mlp\.(?:experts\.\d+\.|shared_experts\.)?)w1\.", r"\1gate_proj."),
        (r"(\.mlp\.(?:experts\.\d+\.|shared_experts\.)?)w2\.", r"\1down_proj."),
        (r"(\.mlp\.(?:experts\.\d+\.|shared_experts\.)?)w3\.", r"\1up_proj."),
    )
)
"""Names of published files, and those of the reference in memory."""


def _architecture() -> Architecture:
    from penstock.engine.models.latent import LATENT_LIKE

    return LATENT_LIKE


def _own_name(name: str) -> str:
    for published, own in _PUBLISHED:
        name = published.sub(own, name)
    return name


def _unrotated(raw: HFConfig) -> tuple[bool, ...]:
    layers, given = layer_count(raw), raw.get("no_rope_layers")
    if given is None:
        every = integer(raw, "no_rope_layer_interval")
        return tuple((index + 1) % every == 0 for index in range(layers))
    if not isinstance(given, list | tuple) or len(given) < layers or any(one not in (0, 1) for one in given):
        raise CheckpointError(
            f"no_rope_layers must be 1 (rotated) or 0 for each of {layers} layers, found {given!r:.80}"
        )
    return tuple(not one for one in given[:layers])


def _sources(raw: HFConfig, unrotated: tuple[bool, ...]) -> tuple[int, ...]:
    """The reference keeps the latents that others attend to by whether they are rotated: those of the last layer."""
    layers, given = layer_count(raw), raw.get("kv_source_layers")
    if given is None:
        return ()
    if (
        not isinstance(given, list | tuple)
        or len(given) != layers
        or any(isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < layers for one in given)
    ):
        raise CheckpointError(f"kv_source_layers must name a layer for each of {layers}, found {given!r:.80}")
    last: dict[bool, int] = {}
    for index, source in enumerate(given):
        if source > index or given[source] != source:
            raise CheckpointError(
                f"kv_source_layers: layer {index} attends to the latents of layer {source}, which has none of its own "
                "or comes behind it"
            )
        if source != index and last.get(unrotated[index]) != source:
            raise CheckpointError(
                f"kv_source_layers: layer {index} attends to the latents of layer {source}; supported: those of the "
                "last layer before it that others attend to too, and that has rotary embedding if it has"
            )
        if source == index and index in given[index + 1 :]:
            last[unrotated[index]] = index
    return () if list(given) == list(range(layers)) else tuple(given)


def _experts(raw: HFConfig) -> MoeConfig | None:
    layers, ffn = sparse_by_type(raw, count(raw, "first_k_dense_replace")), integer(raw, "moe_intermediate_size")
    if not any(layers):
        return None
    # All three keys mean the same; the reference prefers `num_local_experts`, then `num_experts`.
    named = "num_experts" if raw.get("num_experts") is not None else "n_routed_experts"
    moe = MoeConfig(
        experts=integer(raw, "num_local_experts" if "num_local_experts" in raw else named),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=ffn,
        layers=layers,
        normalize=True,
        scale=number(raw, "routed_scaling_factor"),
        shared_ffn_size=ffn * integer(raw, "n_shared_experts"),
        groups=integer(raw, "n_group"),
        top_groups=integer(raw, "topk_group"),
        group_score="best_two",
    )
    if moe.top_k > moe.top_groups * (moe.experts // moe.groups):
        raise CheckpointError(f"num_experts_per_tok is {moe.top_k}: the chosen groups have fewer experts")
    if moe.experts // moe.groups < 2:
        raise CheckpointError(f"groups of {moe.experts // moe.groups} expert have no two best")
    return moe


def _fields(raw: HFConfig) -> ConfigFields:
    layers, kinds = layer_count(raw), raw.get("layer_types")
    if kinds is not None and kinds != [_KIND] * layers:
        raise CheckpointError(f"layer_types must be {_KIND} for each of {layers} layers, found {kinds!r:.80}")
    cap = number(raw, "final_logit_softcapping")
    if cap <= 0:
        raise CheckpointError(f"final_logit_softcapping is {cap:g}; it must be positive")
    given = _USUAL if raw.get("rope_parameters") is None else raw["rope_parameters"]
    given = raw.get("rope_scaling") or given
    # The reference rotates a head's part of that name, whatever the key of sizes says.
    others = {key: value for key, value in raw.items() if key not in ("rope_scaling", "head_dim")}
    fields = latent_fields({**others, "rope_parameters": given}, interleaved=True)
    unrotated = _unrotated(raw)
    index = IndexConfig(
        heads=integer(raw, "index_n_heads"),
        dim=integer(raw, "index_head_dim"),
        most=integer(raw, "index_topk"),
        interleaved=True,
        layers=own_indexers(raw),
        normed_inputs=True,
    )
    if index.dim < fields["latent"].rotary:
        raise CheckpointError(
            f"index_head_dim is {index.dim}, of which qk_rope_head_dim, {fields['latent'].rotary}, are rotated"
        )
    latent = replace(
        fields["latent"],
        norm_eps=number(raw, "rms_norm_eps"),
        index=index,
        unrotated=unrotated if any(unrotated) else (),
        sources=_sources(raw, unrotated),
        head_scales=True,
    )
    return {
        **fields,
        "latent": latent,
        "learned_frequencies": True,
        "logit_softcap": cap,
        "moe": _experts(raw),
    }


MISTRAL_LARGE4 = Family(
    model_type="mistral_large4_text",
    class_name="MistralLarge4ForCausalLM",
    fields=_fields,
    reads=_KEYS,
    limits={"hidden_act": SILU},
    gguf=GGUFFormat(architectures=()),
    names=TensorNames(
        more_linears=("kv_a_proj_with_mqa", "kv_b_proj", "wq_b", "wk"),
        expert_stacks=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
    own_name=_own_name,
    architecture=_architecture,
)
