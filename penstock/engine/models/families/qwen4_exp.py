"""Qwen4: Qwen3.5's layers of experts among several residual streams. Attention chooses blocks of tokens, and some of
the layers with delta nets are told of n-grams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.engine.models.attention_config import BlockIndexConfig
from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    count,
    flag,
    integer,
    layer_count,
)
from penstock.engine.models.families.qwen3_5 import NAMES
from penstock.engine.models.families.qwen3_next import ATTENTION, HYBRID_READS, hybrid_fields, shared_moe
from penstock.engine.models.model_config import NgramConfig, StreamsConfig
from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from penstock.engine.models.architecture import Architecture

_INDEXED = ("indexed_attention", "qwen_sparse_attention")
"""What releases of transformers have written where published files say full_attention."""
_GATES = ("silu", "sigmoid")
_KEYS = frozenset({
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
    "norm_topk_prob", "output_gate_type", "hc_count", "hc_lowrank", "indexer_n_heads", "indexer_kv_heads",
    "indexer_head_dim", "indexer_budget", "indexer_compress_ratio", "ple_layer_ids", "ple_embed_dim",
    "ple_conv_kernel_size", "ngram_size", "heads_per_ngram", "ngram_vocab_size_base",
    "make_ngram_vocab_size_divisible_by", "seed", "split_ngram_parts", "eos_token_id",
    "number_of_conv_states",
})  # fmt: skip
"""The last one the reference computes from the others, whatever a file says."""
_LIMITS: Mapping[str, Any] = {"hidden_act": SILU, "indexer_kv_heads": (1,)}


def _architecture() -> Architecture:
    from penstock.engine.models.qwen4_exp import QWEN4_EXP_LIKE

    return QWEN4_EXP_LIKE


def _fields(raw: HFConfig) -> ConfigFields:
    layers = layer_count(raw)
    fields = hybrid_fields(raw, grouped=False, rotated=1.0, attention=(*_INDEXED, ATTENTION))
    gate = raw.get("output_gate_type") or "silu"
    if gate not in _GATES:
        raise CheckpointError(f"output_gate_type is {gate!r:.80}; supported: {', '.join(_GATES)}")
    streams = StreamsConfig(integer(raw, "hc_count"), rank=integer(raw, "hc_lowrank"))
    if streams.count < 2:
        raise CheckpointError(f"hc_count is {streams.count}; these models have several residual streams")
    ngrams = _ngrams(raw, fields["delta"].layers)
    return {
        **fields,
        # What is no token has no n-grams.
        "virtual_scale": None if any(one is not None for one in ngrams.layers) else 1.0,
        "delta": replace(fields["delta"], sigmoid_gate=gate == "sigmoid"),
        "moe": shared_moe(raw, (True,) * layers, normalize=flag(raw, "norm_topk_prob")),
        "streams": streams,
        "block_index": _block_index(raw, fields),
        "ngrams": ngrams,
    }


def _block_index(raw: HFConfig, fields: ConfigFields) -> BlockIndexConfig:
    dim, rate, budget = (integer(raw, f"indexer_{key}") for key in ("head_dim", "compress_ratio", "budget"))
    if budget % rate:
        raise CheckpointError(f"indexer_budget is {budget}, not a multiple of indexer_compress_ratio, {rate}")
    rotary = int(integer(raw, "head_dim") * fields["rope"].rotated)
    if rotary > dim:
        raise CheckpointError(f"{rotary} dimensions of heads are rotated; indexer_head_dim is {dim}")
    return BlockIndexConfig(integer(raw, "indexer_n_heads"), dim, rate, budget // rate)


def _ngrams(raw: HFConfig, recurrent: tuple[bool, ...]) -> NgramConfig:
    given = raw.get("ple_layer_ids") or ()
    if not isinstance(given, list | tuple) or any(isinstance(one, bool) or not isinstance(one, int) for one in given):
        raise CheckpointError(f"ple_layer_ids must be a list of numbers, found {given!r:.80}")
    own = sorted({one - 1 for one in given})
    if own and not (own[0] >= 0 and own[-1] < len(recurrent) and all(recurrent[one] for one in own)):
        raise CheckpointError(f"ple_layer_ids must number linear_attention layers from 1 on, found {given!r:.80}")
    end = raw.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    if own and (isinstance(end, bool) or not isinstance(end, int)):
        raise CheckpointError("eos_token_id must be set where ple_layer_ids is: no n-gram reaches behind that token")
    size, heads, width = (
        integer(raw, "ngram_size"),
        integer(raw, "heads_per_ngram"),
        integer(raw, "ple_embed_dim", integer(raw, "hidden_size")),
    )
    if own and (size < 2 or width % ((size - 1) * heads)):
        raise CheckpointError(
            f"ple_embed_dim is {width}, which {heads} heads of n-grams of 2 to {size} tokens cannot share evenly"
        )
    return NgramConfig(
        layers=tuple(own.index(layer) if layer in own else None for layer in range(len(recurrent))),
        size=size,
        heads=heads,
        width=width,
        rows=integer(raw, "ngram_vocab_size_base"),
        multiple=integer(raw, "make_ngram_vocab_size_divisible_by"),
        seed=count(raw, "seed"),
        end=end if isinstance(end, int) else 0,
        taps=integer(raw, "ple_conv_kernel_size"),
        parts=integer(raw, "split_ngram_parts"),
    )


QWEN4_EXP = Family(
    model_type="qwen4_exp_text",
    class_name="Qwen4ExpForCausalLM",
    fields=_fields,
    reads=HYBRID_READS | _KEYS,
    limits=_LIMITS,
    norm_offset=1.0,
    names=replace(NAMES, final_norm=""),
    gguf=GGUFFormat(architectures=()),
    architecture=_architecture,
)
