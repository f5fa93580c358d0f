"""DeepSeek V4: attention to a window of tokens and to entries that stand for several of them, several residual streams,
and experts of which the first layers choose by a token's id.

Layers are of three kinds: with the window alone; with entries of few tokens, among which an indexer chooses; with
entries of many, all of which are attended to. Layers with entries have rotary embeddings of their own. The layers for
multi-token prediction (`mtp.*`), which have the window alone, are no part of the decoder: `speculative.mtp` reads the
first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.engine.backends.activation import ClampedSilu
from penstock.engine.models.attention_config import CompressionConfig
from penstock.engine.models.families.deepseek_v4_names import own_name
from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    count,
    integer,
    layer_count,
    mapping,
    number,
)
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.model_config import StreamsConfig
from penstock.engine.models.moe_config import MoeConfig, Scoring
from penstock.engine.models.rope import RopeConfig, read_rope, rope_parameters
from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from penstock.engine.models.architecture import Architecture

WINDOW, CHOSEN, ALL = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_BY_RATIO = {0: WINDOW, 4: CHOSEN, 128: ALL}
_RATES = {CHOSEN: 4, ALL: 128}
_OLD_RATES = {CHOSEN: "compress_rate_csa", ALL: "compress_rate_hca"}
_HASHED, _SCORED = "hash_moe", "moe"
_HASHED_LAYERS = 3
"""Where the configuration does not say how many."""
_ROTARY = 64 / 512
"""The share of a head that is rotated, likewise."""
_SCORING: Mapping[str, Scoring] = {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid"}
_KINDS = ("default", "linear", "llama3", "yarn")
_KEYS = frozenset({
    "attention_bias", "compress_rate_csa", "compress_rate_hca", "compress_rates", "compress_ratios",
    "compress_rope_theta", "hc_eps", "hc_mult", "hc_sinkhorn_iters", "index_head_dim", "index_n_heads", "index_topk",
    "mlp_layer_types", "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "norm_topk_prob",
    "num_experts_per_tok", "num_hash_layers", "num_local_experts", "num_nextn_predict_layers", "o_groups",
    "o_lora_rank", "q_lora_rank", "qk_rope_head_dim", "routed_scaling_factor", "scoring_func", "sliding_window",
    "swiglu_limit", "expert_dtype",
})  # fmt: skip
"""Some change nothing, as in the reference: there is one key and one shared expert, weights always sum to one, and
attention has no biases."""


def _architecture() -> Architecture:
    from penstock.engine.models.deepseek_v4 import DEEPSEEK_V4_LIKE

    return DEEPSEEK_V4_LIKE


def _kinds(raw: HFConfig, key: str, known: tuple[str, ...], others: list[str]) -> list[str]:
    """Of each layer. What stands behind the last one is for multi-token prediction."""
    layers, given = layer_count(raw), raw.get(key)
    if given is None:
        given = others
    if not isinstance(given, list | tuple) or len(given) < layers or not {*map(str, given)}.issubset(known):
        raise CheckpointError(
            f"{key} must name one of {', '.join(known)} for each of {layers} layers, found {given!r:.80}"
        )
    return [str(kind) for kind in given[:layers]]


def _mixers(raw: HFConfig) -> list[str]:
    layers, ratios = layer_count(raw), raw.get("compress_ratios")
    others = [ALL] * min(layers, 2) + [CHOSEN if index % 2 else ALL for index in range(layers - 2)]
    if ratios is not None and raw.get("layer_types") is None:
        if not isinstance(ratios, list | tuple) or any(ratio not in _BY_RATIO for ratio in ratios):
            raise CheckpointError(f"compress_ratios must be 0, 4 or 128 of each layer, found {ratios!r:.80}")
        others = [_BY_RATIO[ratio] for ratio in ratios]
    return _kinds(raw, "layer_types", (WINDOW, CHOSEN, ALL), others)


def _rates(raw: HFConfig) -> Mapping[str, int]:
    given: Mapping[str, Any] = _RATES if raw.get("compress_rates") is None else mapping(raw, "compress_rates")
    old = {kind: raw[key] for kind, key in _OLD_RATES.items() if raw.get(key) is not None}
    rates = {**given, **old}
    return {WINDOW: 0, **{kind: integer(rates, kind) for kind in (CHOSEN, ALL) if kind in rates}}


def _ropes(raw: HFConfig) -> tuple[RopeConfig, RopeConfig]:
    """Of layers with entries, and of those without."""
    given, share = rope_parameters(raw), raw.get("partial_rotary_factor")
    if share is None:
        old = raw.get("qk_rope_head_dim")
        share = _ROTARY if old is None else integer(raw, "qk_rope_head_dim") / integer(raw, "head_dim")
    main, compress = given.get("main"), given.get("compress")
    if isinstance(main, Mapping) != isinstance(compress, Mapping):
        raise CheckpointError("rope parameters must be given for both main and compress, or for neither")
    if not isinstance(main, Mapping) or not isinstance(compress, Mapping):
        main = {"rope_theta": raw.get("rope_theta"), "partial_rotary_factor": share}
        compress = {**given, "rope_theta": raw.get("compress_rope_theta"), "partial_rotary_factor": share}
        if compress.get("rope_type", compress.get("type")) == "yarn":
            compress = {"attention_factor": 1.0, **compress}
    found, outer = [], raw.get("original_max_position_embeddings")
    for name, parameters in (("compress", compress), ("main", main)):
        rope = read_rope(raw, parameters, partial=True)
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in _KINDS:
            raise CheckpointError(
                f"rope scaling {kind!r:.80} of {name} is not supported; supported: {', '.join(_KINDS)}"
            )
        # Which of the two the reference takes depends on the kind.
        if kind in ("llama3", "yarn") and outer not in (None, parameters.get("original_max_position_embeddings")):
            raise CheckpointError(f"original_max_position_embeddings is {outer!r:.80}, and another in rope parameters")
        found.append(rope)
    if found[0].rotated != found[1].rotated:
        raise CheckpointError(f"rope parameters of main and compress rotate {found[1].rotated} and {found[0].rotated}")
    return found[0], found[1]


def _experts(raw: HFConfig, ffn: int) -> MoeConfig:
    layers, scoring = layer_count(raw), str(raw.get("scoring_func"))
    if scoring not in _SCORING:
        raise CheckpointError(f"scoring_func is {scoring!r:.80}; supported: {', '.join(_SCORING)}")
    first = _HASHED_LAYERS if raw.get("num_hash_layers") is None else count(raw, "num_hash_layers")
    others = [_HASHED if index < first else _SCORED for index in range(layers)]
    kinds = _kinds(raw, "mlp_layer_types", (_HASHED, _SCORED), others)
    return MoeConfig(
        experts=integer(raw, "num_local_experts" if "num_local_experts" in raw else "n_routed_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=ffn,
        normalize=True,
        layers=(True,) * layers,
        scoring=_SCORING[scoring],
        correction_bias=True,
        hashed=tuple(kind == _HASHED for kind in kinds),
        scale=number(raw, "routed_scaling_factor"),
        shared_ffn_size=ffn,
    )


def _fields(raw: HFConfig) -> ConfigFields:
    heads, dim, groups = integer(raw, "num_attention_heads"), integer(raw, "head_dim"), integer(raw, "o_groups")
    ffn = integer(raw, "intermediate_size" if raw.get("intermediate_size") is not None else "moe_intermediate_size")
    kinds, rates = _mixers(raw), _rates(raw)
    missing = {*kinds} - rates.keys()
    if missing:
        raise CheckpointError(f"compress_rates has no rate of {missing.pop()}")
    if heads * dim % groups:
        raise CheckpointError(f"o_groups is {groups}, which does not divide {heads} heads of {dim}")
    compress, main = _ropes(raw)
    index_dim, rotary = integer(raw, "index_head_dim"), int(dim * main.rotated)
    if rotary % 2 or not 0 < rotary <= (min(dim, index_dim) if CHOSEN in kinds else dim):
        raise CheckpointError(
            f"{rotary} dimensions of heads are rotated, in pairs; heads have {dim}, those of the indexer {index_dim}"
        )
    limit = number(raw, "swiglu_limit")
    if not limit > 0:
        raise CheckpointError(f"swiglu_limit is {limit}; it must be positive")
    return {
        "activation": ClampedSilu(limit),
        "attention_sinks": True,
        "compression": CompressionConfig(
            rates=tuple(rates[kind] for kind in kinds),
            chosen=tuple(kind == CHOSEN for kind in kinds),
            window=integer(raw, "sliding_window"),
            query_rank=integer(raw, "q_lora_rank"),
            output_groups=groups,
            output_rank=integer(raw, "o_lora_rank"),
            index_heads=integer(raw, "index_n_heads"),
            index_dim=index_dim,
            most=integer(raw, "index_topk"),
        ),
        "ffn_size": ffn,
        "head_dim": dim,
        "local_rope": main,
        "moe": _experts(raw, ffn),
        "mtp_before_norm": True,
        "num_kv_heads": 1,
        "rope": compress,
        "streams": StreamsConfig(integer(raw, "hc_mult"), integer(raw, "hc_sinkhorn_iters"), number(raw, "hc_eps")),
    }


DEEPSEEK_V4 = Family(
    model_type="deepseek_v4",
    class_name="DeepseekV4ForCausalLM",
    fields=_fields,
    reads=_KEYS,
    limits={"hidden_act": SILU},
    gguf=GGUFFormat(architectures=()),
    names=TensorNames(
        more_linears=("q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj"),
        expert_stacks=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
    own_name=own_name,
    architecture=_architecture,
)
