"""DeepSeek V3.2, and GLM-5, whose decoders are DeepSeek V3's with DSA, DeepSeek's sparse attention: in every layer an
indexer chooses the few cached tokens that a token attends to.

Of GLM-5's layers some may have no indexer; they attend to what the last one before them chose. Its indexers rotate
neighbouring dimensions, those of DeepSeek halves. The Hadamard transform of DeepSeek's own code is left out, as in the
reference: it turns queries and keys alike, so that scores stay the same.

MTP layers: see `deepseek`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.engine.models.attention_config import IndexConfig
from penstock.engine.models.families.deepseek import latent_fields, sparse_layers
from penstock.engine.models.families.deepseek_gguf import LATENT_GGUF, LATENT_TENSORS, v3_from_gguf
from penstock.engine.models.families.family import (
    AXES,
    NEXTN_KEY,
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    count,
    flag,
    integer,
    layer_count,
    number,
)
from penstock.engine.models.families.sigmoid_experts import require_sigmoid
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.moe_config import MoeConfig
from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from penstock.engine.models.architecture import Architecture

SPARSE_KEYS = frozenset({
    "attention_bias", "first_k_dense_replace", "index_head_dim", "index_n_heads", "index_topk", "kv_lora_rank",
    "mlp_layer_types", "moe_intermediate_size", "moe_layer_freq", "n_group", "n_routed_experts", "n_shared_experts",
    "norm_topk_prob", "num_experts", "num_experts_per_tok", "num_local_experts", "num_mtp_layers",
    "num_nextn_predict_layers", "q_lora_rank", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim",
    "routed_scaling_factor", "topk_group", "v_head_dim",
})  # fmt: skip
SHARING_KEYS = frozenset({"indexer_types", "index_topk_freq", "index_topk_pattern", "index_skip_topk_offset"})
SPARSE_NAMES = TensorNames(more_linears=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "wq_b", "wk"))
_KIND_NAMES = ("indexed_attention", "deepseek_sparse_attention")
"""What `layer_types` calls these layers now, and what transformers before 5.18 called them."""
_CONTEXT_OF_SHARING = 1 << 20
"""Of GLM-5.2, the first whose layers share what they chose."""
_LIMITS: Mapping[str, Any] = {
    "hidden_act": SILU,
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "rope_interleave": (True,),
}


def _architecture() -> Architecture:
    from penstock.engine.models.latent import LATENT_LIKE

    return LATENT_LIKE


def _sparse_layers(raw: HFConfig) -> tuple[bool, ...]:
    """Which layers have experts."""
    layers, kinds = layer_count(raw), raw.get("mlp_layer_types")
    if kinds is None:
        return sparse_layers(raw)
    if (
        not isinstance(kinds, list | tuple)
        or len(kinds) != layers
        or not {"dense", "sparse"}.issuperset(map(str, kinds))
    ):
        raise CheckpointError(
            f"mlp_layer_types must say dense or sparse for each of {layers} layers, found {kinds!r:.80}"
        )
    return tuple(kind == "sparse" for kind in kinds)


def _experts(raw: HFConfig, layers: tuple[bool, ...]) -> MoeConfig | None:
    ffn = integer(raw, "moe_intermediate_size")
    if not any(layers):
        return None
    # All three keys mean the same; the reference prefers `num_local_experts`, then `num_experts`.
    named = "num_experts" if raw.get("num_experts") is not None else "n_routed_experts"
    return MoeConfig(
        experts=integer(raw, "num_local_experts" if "num_local_experts" in raw else named),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=ffn,
        layers=layers,
        scale=number(raw, "routed_scaling_factor"),
        shared_ffn_size=ffn * count(raw, "n_shared_experts"),
        normalize=flag(raw, "norm_topk_prob"),
        scoring="sigmoid",
        correction_bias=True,
        groups=integer(raw, "n_group"),
        top_groups=integer(raw, "topk_group"),
        group_score="best_two",
    )


def own_indexers(raw: HFConfig) -> tuple[bool, ...]:
    """Which layers of GLM-5 have one. See `indexer_kinds`."""
    own = indexer_kinds(raw)
    if not own[0]:
        raise CheckpointError("indexer_types: the first layer must have an indexer, there is none before it to share")
    return own


def indexer_kinds(raw: HFConfig) -> tuple[bool, ...]:
    """Which layers have an indexer: named, as a pattern, or every n-th."""
    layers, kinds, pattern = layer_count(raw), raw.get("indexer_types"), raw.get("index_topk_pattern")
    if kinds is None and pattern is None:
        every = max(1, count({"index_topk_freq": 1, **raw}, "index_topk_freq"))
        offset = count({"index_skip_topk_offset": 2, **raw}, "index_skip_topk_offset")
        return tuple(max(index - offset + 1, 0) % every == 0 for index in range(layers))
    if kinds is None and isinstance(pattern, str):
        kinds = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    kinds = pattern if kinds is None else kinds
    if (
        not isinstance(kinds, list | tuple)
        or len(kinds) != layers
        or not {"full", "shared"}.issuperset(map(str, kinds))
    ):
        raise CheckpointError(
            f"indexer_types (or index_topk_pattern) must say full or shared for each of {layers} layers, "
            f"found {kinds!r:.80}"
        )
    return tuple(kind == "full" for kind in kinds)


def sparse_fields(raw: HFConfig, interleaved: bool, own: tuple[bool, ...], sparse: tuple[bool, ...]) -> ConfigFields:
    """`interleaved`: whether indexers rotate neighbours; `own`: which layers have one, `sparse`: which have experts."""
    kinds = raw.get("layer_types")
    if kinds is not None and not any(kinds == [name] * layer_count(raw) for name in _KIND_NAMES):
        raise CheckpointError(
            f"layer_types must be {' or '.join(_KIND_NAMES)} for each of {layer_count(raw)} layers, found {kinds!r:.80}"
        )
    # The reference takes the size of what is rotated, whatever the key says.
    fields = latent_fields({**raw, "head_dim": None}, interleaved=True)
    integer(raw, "q_lora_rank")
    index = IndexConfig(
        heads=integer(raw, "index_n_heads"),
        dim=integer(raw, "index_head_dim"),
        most=integer(raw, "index_topk"),
        interleaved=interleaved,
        layers=own,
    )
    if index.dim < fields["latent"].rotary:
        raise CheckpointError(
            f"index_head_dim is {index.dim}, of which qk_rope_head_dim, {fields['latent'].rotary}, are rotated"
        )
    return {**fields, "latent": replace(fields["latent"], index=index), "moe": _experts(raw, sparse)}


def _deepseek_fields(raw: HFConfig) -> ConfigFields:
    return sparse_fields(raw, False, (True,) * layer_count(raw), _sparse_layers(raw))


def _glm_fields(raw: HFConfig) -> ConfigFields:
    return sparse_fields(raw, True, own_indexers(raw), _sparse_layers(raw))


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> dict[str, Any]:
    require_sigmoid(keys)
    if not keys.whole("attention.q_lora_rank", 0):
        raise CheckpointError(f"{keys.architecture}.attention.q_lora_rank is missing; the file is damaged")
    return {
        **v3_from_gguf(keys, config),
        "index_n_heads": keys.whole("attention.indexer.head_count", 0),
        "index_head_dim": keys.whole("attention.indexer.key_length", 0),
        "index_topk": keys.whole("attention.indexer.top_k", 0),
    }


def _glm_from_gguf(keys: GGUFKeys, config: HFConfig) -> dict[str, Any]:
    """Files of GLM-5.2 from before they said which layers have an indexer of their own are known by their context."""
    found = _from_gguf(keys, config)
    layers = found["num_hidden_layers"]
    own = keys.flags("attention.indexer.types", layers)
    if own is None:
        some = config["max_position_embeddings"] >= _CONTEXT_OF_SHARING
        own = tuple(not some or index < 2 or index % 4 == 2 for index in range(layers))
    return {**found, "indexer_types": ["full" if one else "shared" for one in own]}


_FORMAT = GGUFFormat(
    architectures=("deepseek32",),
    config=_from_gguf,
    reads=LATENT_GGUF
    | {"attention.indexer.head_count", "attention.indexer.key_length", "attention.indexer.top_k", NEXTN_KEY},
    windowed=False,
    own_head_sizes=True,
    tensors={
        **LATENT_TENSORS,
        "indexer.attn_q_b": "self_attn.indexer.wq_b",
        "indexer.attn_k": "self_attn.indexer.wk",
        "indexer.k_norm": "self_attn.indexer.k_norm",
        "indexer.proj": "self_attn.indexer.weights_proj",
    },
)
DEEPSEEK_V32 = Family(
    model_type="deepseek_v32",
    class_name="DeepseekV32ForCausalLM",
    fields=_deepseek_fields,
    reads=SPARSE_KEYS,
    limits={**_LIMITS, "indexer_rope_interleave": (False,)},
    gguf=_FORMAT,
    names=SPARSE_NAMES,
    architecture=_architecture,
)
GLM_MOE_DSA = Family(
    model_type="glm_moe_dsa",
    class_name="GlmMoeDsaForCausalLM",
    fields=_glm_fields,
    reads=SPARSE_KEYS | SHARING_KEYS,
    limits={**_LIMITS, "indexer_rope_interleave": (True,)},
    gguf=replace(
        _FORMAT,
        architectures=("glm-dsa",),
        config=_glm_from_gguf,
        reads=_FORMAT.reads | AXES | {"attention.indexer.types"},
    ),
    names=SPARSE_NAMES,
    architecture=_architecture,
)
