"""From the keys of a `config.json` to a model's shape.

Families that the engine runs are read by the engine's own reader, so that a plan is for the model that would be served.
Others are read by the keys that their configurations share: enough to count parameters and cache, not to run them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.engine.backends.activation import Xielu, has_gate
from penstock.engine.models.attention_config import CompressionConfig
from penstock.engine.models.families import FAMILIES, family_of, read_config, text_config
from penstock.engine.models.families.family import integer, layer_count
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.ngram_hash import table_rows
from penstock.engine.models.recurrence_config import DeltaConfig, MambaConfig, ShortConvConfig
from penstock.engine.models.wrappers import decoder_keys
from penstock.errors import CheckpointError
from penstock.planning.compression import Compression
from penstock.planning.gated_streams import GatedStreams
from penstock.planning.quantized_form import stored_form
from penstock.planning.shape import LayerHeads, ModelShape, Moe
from penstock.planning.token_mixers import Delta, Mamba, Mla, ShortConv, SparseBlocks

Config = Mapping[str, Any]
Windows = tuple[int | None, ...]


def shape_of_config(raw: Config, name: str) -> ModelShape:
    """CheckpointError for a configuration that is not a decoder's."""
    if str(text_config(raw).get("model_type")) in FAMILIES:
        shape = shape_of_model(read_config(raw), name)
    else:
        shape = _other(_decoder(raw), name)
    quantization = raw.get("quantization_config") or _decoder(raw).get("quantization_config")
    if isinstance(quantization, Mapping) and "expert_dtype" in raw:
        quantization = {"expert_dtype": raw["expert_dtype"], **quantization}
    stored = stored_form(quantization) if quantization else None
    return shape.with_stored(stored)


def shape_of_model(model: ModelConfig, name: str) -> ModelShape:
    """Of a model that the engine runs."""
    moe = None
    if model.moe is not None:
        moe = Moe(
            model.moe.experts,
            model.moe.top_k,
            model.moe.ffn_size,
            model.moe.layers,
            bias=model.moe.expert_bias,
            shared_ffn=model.moe.shared_ffn_size,
            shared_gate=model.moe.shared_gate,
            router_bias=model.moe.router_bias or model.moe.correction_bias,
            gate=has_gate(model.activation),
            latent=model.moe.latent,
            normed=bool(family_of(model.family).names.expert_norms[0]),
            apart=model.moe.expert_gains,
            hashed=model.moe.hashed,
        )
    names = family_of(model.family).names
    mla, latent = None, model.latent
    if latent is not None:
        mla = Mla(latent.rank, latent.rotary, latent.plain, latent.value, latent.query_rank, latent.input_bias)
        index = latent.index
        if index is not None:
            mla = replace(
                mla, index_heads=index.heads, index_dim=index.dim, indexed=index.layers, index_rate=index.rate
            )
        mla = replace(mla, gated_queries=latent.gated_queries, gate_rank=latent.gate_rank)
        mla = replace(
            mla,
            unrotated=latent.unrotated,
            shared=tuple(latent.shares(layer) for layer in range(model.num_layers)) if latent.sources else (),
            starts=model.stage_starts,
            index_from_inputs=index is not None and index.normed_inputs,
            head_scales=latent.head_scales,
        )
    sparse, streams = model.sparse_blocks, model.streams
    return ModelShape(
        name=name,
        family=model.family,
        layers=model.num_layers,
        hidden=model.hidden_size,
        ffn=model.ffn_size,
        ffn_sizes=model.ffn_sizes,
        layer_heads=_heads(model) if model.layer_heads else (),
        query_heads=model.query_heads,
        token_inputs=None if model.token_inputs is None else (model.token_inputs.size, model.token_inputs.vocab),
        layer_factors=bool(model.layer_heads) and model.normed_values,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads if latent is None else model.num_heads,
        head_dim=model.head_dim,
        vocab=model.vocab_size,
        max_positions=model.max_positions,
        windows=model.windows,
        tied_embeddings=model.tied_embeddings,
        qkv_bias=model.qkv_bias,
        output_bias=model.output_bias,
        mlp_bias=model.mlp_bias,
        qk_norm=model.rotated_qk_norm or (model.qk_norm and not model.qk_layer_norm),
        whole_qk_norm=model.row_norms or model.qk_layer_norm,
        sandwich_norms=bool(names.mixer_out_norm and names.mixer_norm),
        one_norm=model.one_norm,
        expert_norm=bool(names.feed_forward_out_norm) and not names.mixer_out_norm,
        rope_factors=latent.rotary // 2 if latent is not None and model.learned_frequencies else 0,
        gated_residual=model.residual_temperature is not None,
        norm_parts=(1 if names.final_norm else 0) + model.norm_bias,
        head_bias=model.head_bias,
        sinks=model.attention_sinks,
        window_sinks=model.window_sinks,
        value_dim=model.value_dim,
        moe=moe,
        mla=mla,
        sparse_blocks=None if sparse is None else SparseBlocks(sparse.layers, sparse.heads, sparse.dim),
        gated_attention=model.gated_attention or model.output_gate,
        output_gate=model.output_gate,
        gates_by_head=model.gates_by_head,
        delta=None if model.delta is None else _delta(model.delta),
        mamba=None if model.mamba is None else _mamba(model.mamba),
        short_conv=None if model.short_conv is None else _short_conv(model.short_conv),
        compression=None if model.compression is None else _compression(model, model.compression),
        gated_streams=_gated_streams(model),
        kept_layers=0 if model.cycles is None else 2 * model.cycles.layers,
        apart_streams=0 if streams is None or latent is None or streams.rounds else streams.count,
        mixed_streams=0 if streams is None or latent is None or not streams.rounds else streams.count,
        only=model.only,
        gate=has_gate(model.activation),
        activation_numbers=2 if isinstance(model.activation, Xielu) else 0,
    )


def _heads(model: ModelConfig) -> tuple[LayerHeads, ...]:
    made = {"": 2, "values": 1, "both": 0}
    return tuple(LayerHeads(*model.heads_in(index), made[model.shares(index)]) for index in range(model.num_layers))


def _compression(model: ModelConfig, shape: CompressionConfig) -> Compression:
    return Compression(
        rates=shape.rates,
        chosen=shape.chosen,
        heads=model.num_heads,
        dim=model.head_dim,
        window=shape.window,
        query_rank=shape.query_rank,
        output_groups=shape.output_groups,
        output_rank=shape.output_rank,
        index_heads=shape.index_heads,
        index_dim=shape.index_dim,
        most=shape.most,
        streams=1 if model.streams is None else model.streams.count,
    )


def _gated_streams(model: ModelConfig) -> GatedStreams | None:
    streams, index, ngrams = model.streams, model.block_index, model.ngrams
    if streams is None or index is None or ngrams is None:
        return None
    tables = (0 if one is None else table_rows(ngrams, one) for one in ngrams.layers)
    return GatedStreams(
        count=streams.count,
        rank=streams.rank,
        index_heads=index.heads,
        index_dim=index.dim,
        rate=index.rate,
        tables=tuple(tables),
        told=ngrams.width,
        row=ngrams.width // ngrams.all_heads,
        taps=ngrams.taps,
        before=ngrams.before,
        reach=ngrams.reach,
    )


def _delta(delta: DeltaConfig) -> Delta:
    return Delta(
        delta.layers,
        delta.k_heads,
        delta.v_heads,
        delta.k_dim,
        delta.v_dim,
        delta.conv,
        delta.grouped,
        delta.by_channel,
    )


def _short_conv(short: ShortConvConfig) -> ShortConv:
    return ShortConv(short.layers, short.channels, short.width, short.bias)


def _mamba(mamba: MambaConfig) -> Mamba:
    return Mamba(
        layers=mamba.layers,
        heads=mamba.heads,
        head_dim=mamba.head_dim,
        groups=mamba.groups,
        state=mamba.state,
        conv=mamba.conv,
        conv_bias=mamba.conv_bias,
        in_bias=mamba.in_bias,
        out_bias=mamba.out_bias,
        norm_groups=mamba.norm_groups,
        beside=mamba.beside is not None,
    )


def _decoder(raw: Config) -> Config:
    """The decoder's keys, which multimodal models have one level down."""
    inner = decoder_keys(raw)
    if inner is not raw and "num_hidden_layers" not in raw:
        return {"tie_word_embeddings": raw.get("tie_word_embeddings", False), **inner}
    return raw


def _other(raw: Config, name: str) -> ModelShape:
    family = str(raw.get("model_type") or "")
    layers, hidden, heads = layer_count(raw), integer(raw, "hidden_size"), integer(raw, "num_attention_heads")
    head_dim = integer(raw, "head_dim", max(hidden // heads, 1))
    attention_bias = raw.get("attention_bias") is True or family.startswith("qwen2")
    return ModelShape(
        name=name,
        family=family or "unknown",
        layers=layers,
        hidden=hidden,
        ffn=integer(raw, "intermediate_size_mlp", integer(raw, "intermediate_size")),
        heads=heads,
        kv_heads=integer(raw, "num_key_value_heads", heads),
        head_dim=head_dim,
        vocab=integer(raw, "vocab_size"),
        max_positions=integer(raw, "max_position_embeddings"),
        windows=_windows(raw, family, layers),
        tied_embeddings=raw.get("tie_word_embeddings") is True,
        qkv_bias=attention_bias,
        output_bias=attention_bias and family in ("gpt_oss", "llama4_text"),
        qk_norm=raw.get("use_qk_norm") is True or family.startswith("qwen3"),
        whole_qk_norm=family.startswith("olmo2"),
        sandwich_norms=family in ("glm4", "gemma3n_text"),
        sinks=family == "gpt_oss",
        moe=_moe(raw, family, layers),
        mla=_mla(raw),
        served=False,
    )


def _windows(raw: Config, family: str, layers: int) -> Windows:
    """Of each layer: by `layer_types`, by the family's pattern, or none. An attention chunk bounds a layer as a window
    of its size does."""
    window = raw.get("sliding_window") or raw.get("attention_chunk_size")
    if not isinstance(window, int) or window < 1 or raw.get("use_sliding_window") is False:
        return (None,) * layers
    kinds = raw.get("layer_types")
    if isinstance(kinds, list):
        if len(kinds) != layers:
            raise CheckpointError(f"layer_types has {len(kinds)} entries for {layers} layers")
        return tuple(None if kind in ("full_attention", "attention") else window for kind in kinds)
    if family == "llama4_text":
        return tuple(None if (index + 1) % 4 == 0 else window for index in range(layers))
    if family == "gpt_oss":
        return tuple(window if index % 2 == 0 else None for index in range(layers))
    return (window,) * layers


def _mla(raw: Config) -> Mla | None:
    if raw.get("kv_lora_rank") is None:
        return None
    return Mla(
        kv_rank=integer(raw, "kv_lora_rank"),
        rope_dim=integer(raw, "qk_rope_head_dim"),
        nope_dim=integer(raw, "qk_nope_head_dim"),
        value_dim=integer(raw, "v_head_dim"),
        q_rank=None if raw.get("q_lora_rank") is None else integer(raw, "q_lora_rank"),
    )


_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")


def _moe(raw: Config, family: str, layers: int) -> Moe | None:
    key = next((key for key in _EXPERTS if raw.get(key)), None)
    if key is None:
        return None
    width = integer(raw, "moe_intermediate_size", integer(raw, "intermediate_size"))
    shared = _count(raw, "shared_expert_intermediate_size") or width * _count(raw, "n_shared_experts")
    if family == "llama4_text":
        shared = width
    experts, top_k = integer(raw, key), integer(raw, "num_experts_per_tok", integer(raw, "moe_topk", 1))
    if top_k > experts:
        raise CheckpointError(f"a token cannot visit {top_k} of {experts} experts")
    return Moe(
        experts=experts,
        top_k=top_k,
        ffn=width,
        layers=_expert_layers(raw, layers),
        shared_ffn=shared,
        shared_gate=bool(raw.get("shared_expert_intermediate_size")),
        bias=family == "gpt_oss",
        router_bias=family in ("gpt_oss", "glm4_moe") or raw.get("topk_method") == "noaux_tc",
    )


def _expert_layers(raw: Config, layers: int) -> tuple[bool, ...]:
    """Which layers have experts: after the first dense ones, every n-th, and not those listed as dense."""
    dense, listed = _count(raw, "first_k_dense_replace"), raw.get("mlp_only_layers") or ()
    step = _count(raw, "decoder_sparse_step") or _count(raw, "interleave_moe_layer_step") or 1
    frequency = raw.get("moe_layer_freq") or 1
    if isinstance(frequency, list) and len(frequency) == layers:
        return tuple(bool(entry) for entry in frequency)
    every = _count(raw, "moe_layer_freq") or 1
    if not isinstance(listed, list | tuple):
        raise CheckpointError(f"config key 'mlp_only_layers' must be a list, found {listed!r:.80}")
    return tuple(
        index >= dense and index % every == 0 and index not in listed and (index + 1) % step == 0
        for index in range(layers)
    )


def _count(raw: Config, key: str) -> int:
    """An integer from 0 on; 0 where it is left out."""
    value = raw.get(key)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise CheckpointError(f"config key {key!r} must be an integer from 0 on, found {value!r:.80}")
    return value
