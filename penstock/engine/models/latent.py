"""Layers of DeepSeek and those like it: attention over latents, and a feed-forward that is dense or of experts."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from penstock.engine.backends.interface import HeadScales, IndexLayout, IndexNorm, LatentLayout, LatentWeights
from penstock.engine.models.architecture import Architecture, LayerContext
from penstock.engine.models.decoder import DecoderLayer
from penstock.engine.models.layers.composed import StackedLinear
from penstock.engine.models.layers.indexer import Indexer, PagedPoolIndexer, PooledIndexer
from penstock.engine.models.layers.latent_attention import LatentAttention
from penstock.engine.models.layers.linear import Linear, WideLinear
from penstock.engine.models.layers.rotary import log_positions, query_scales
from penstock.engine.models.llama import LlamaDecoder, compose_feed_forward
from penstock.engine.models.weights import WeightReader
from penstock.errors import CheckpointError

QUERY, QUERY_DOWN, QUERY_UP = "q_proj", "q_a_proj", "q_b_proj"
LATENT, LATENT_UP, OUTPUT = "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"
QUERY_NORM, LATENT_NORM = "q_a_layernorm", "kv_a_layernorm"
INDEXER, INDEX_QUERIES, INDEX_KEYS = "indexer.", "wq_b", "wk"
INDEX_NORM, INDEX_WEIGHTS, INDEX_INPUT_NORM = "k_norm", "weights_proj", "q_input_norm"
POOL_GATES, POOL_BIAS = "index_kpool_compress_gate", "index_kpool_compress_ape"
SCALES = "softmax_scaling"
"""Of the factors of queries, in attention and in its indexer."""


def compose_layer(context: LayerContext) -> DecoderLayer:
    read, names, prefix, hidden = context.read, context.names, context.prefix, context.config.hidden_size
    moe, behind = context.config.moe, None
    if names.feed_forward_out_norm and moe is not None and moe.layers[context.index]:
        behind = read.norm(prefix + names.feed_forward_out_norm, hidden)
    return DecoderLayer(
        mixer_norm=read.norm(prefix + names.mixer_norm, hidden),
        mixer=compose_attention(context),
        feed_forward_norm=read.norm(prefix + names.feed_forward_norm, hidden),
        feed_forward=compose_feed_forward(context),
        feed_forward_out_norm=behind,
    )


def compose_attention(context: LayerContext) -> LatentAttention:
    read, config, latent = context.read, context.config, context.config.latent
    if latent is None:
        raise CheckpointError(f"{config.family} models have latents, and this configuration has none")
    prefix, hidden, heads = context.prefix + context.names.attention, config.hidden_size, config.num_heads
    layout = LatentLayout(
        heads=heads,
        latent=latent.rank,
        plain=latent.plain_in(context.index),
        rotary=latent.rotary_in(context.index),
        value=latent.value,
        scale=config.attention_scale,
        interleaved=latent.interleaved,
    )
    queries, index, growth = heads * layout.query, latent.index, config.query_growth
    shares = latent.shares(context.index)

    def inputs() -> Linear:
        kv = {} if shares else {LATENT: layout.cached}
        if latent.query_rank is not None:
            return read.linear(prefix, {QUERY_DOWN: latent.query_rank, **kv}, hidden, latent.input_bias)
        if not latent.input_bias or shares:
            return read.linear(prefix, {QUERY: queries, **kv}, hidden)
        # Only one of the two has a bias.
        return StackedLinear(
            [read.linear(prefix, {QUERY: queries}, hidden), read.linear(prefix, kv, hidden, bias=True)]
        )

    narrow, up, wide = latent.query_rank, queries, latent.query_rank or 0
    if latent.gated_queries:
        up, wide = queries + heads * latent.value, 2 * wide
    gate = {context.names.output_gate: heads * latent.value}
    rows = layout.plain + latent.value
    return LatentAttention(
        # An indexer reads what the projections read, as plain numbers.
        ops=context.inner if index is None else read.backend.ops,
        attention_ops=read.backend.ops,
        inputs=inputs(),
        output=read.linear(prefix, {OUTPUT: hidden}, heads * latent.value, config.output_bias),
        heads=layout,
        weights=LatentWeights(
            # Latents of another layer are normalized there.
            norm=read.ones(latent.rank) if shares else read.norm(prefix + LATENT_NORM, latent.rank),
            eps=latent.norm_eps,
            up=read.get(f"{prefix}{LATENT_UP}.weight", heads * rows, latent.rank).view(heads, rows, latent.rank),
        ),
        cos_sin=context.cos_sin,
        query_norm=None if narrow is None else read.norm(prefix + QUERY_NORM, narrow),
        query_up=None if narrow is None else read.linear(prefix, {QUERY_UP: up}, wide),
        query_scales=None if growth is None else query_scales(growth, len(context.cos_sin), read.backend.device),
        head_scales=compose_scales(context, prefix, heads) if latent.head_scales else None,
        source=latent.sources[context.index] if shares else None,
        cache_scale=_cache_scale(context) if context.fp8_cache else None,
        most=None if index is None else index.everything,
        indexer=None if index is None or not index.layers[context.index] else compose_indexer(context, prefix),
        gated_queries=latent.gated_queries,
        output_gate=read.linear(prefix, gate, hidden) if config.output_gate else None,
        sinks=read.get(f"{prefix}sinks", heads, dtype=torch.float32) if config.attention_sinks else None,
    )


def compose_scales(context: LayerContext, at: str, heads: int) -> HeadScales:
    read, positions = context.read, len(context.cos_sin)
    rates, offsets = (read.get(f"{at}{SCALES}.{part}", heads, dtype=torch.float32) for part in ("scale", "bias"))
    key = f"{SCALES} of {positions}"
    if key not in read.made:  # which all layers share
        read.made[key] = log_positions(positions, read.backend.device)
    return HeadScales(rates, offsets, read.made[key])


def _cache_scale(context: LayerContext) -> Tensor:
    """Of the layer that keeps the latents."""
    latent, at = context.config.latent, context.index
    assert latent is not None
    source = latent.sources[at] if latent.sources else at
    return context.read.kv_scales(context.beginning(source) + context.names.attention, 1)[0]


def compose_indexer(context: LayerContext, attention: str) -> Indexer:
    """`attention`: what the names of the layer's attention begin with."""
    read, latent, hidden = context.read, context.config.latent, context.config.hidden_size
    assert latent is not None and latent.index is not None
    index, at, ops = latent.index, attention + INDEXER, read.backend.ops
    queries = hidden if index.normed_inputs else latent.query_rank
    assert queries is not None

    def norm(name: str, size: int, eps: float) -> IndexNorm:
        return IndexNorm(read.get(f"{at}{name}.weight", size), read.get(f"{at}{name}.bias", size), eps)

    made = Indexer(
        ops=ops,
        layout=IndexLayout(
            index.heads,
            index.dim,
            latent.rotary_in(context.index),
            index.most,
            index.interleaved,
            index.rotates_last,
        ),
        keys=read.linear(at, {INDEX_KEYS: index.dim}, hidden),
        norm=norm(INDEX_NORM, index.dim, index.norm_eps),
        queries=read.linear(at, {INDEX_QUERIES: index.heads * index.dim}, queries),
        head_weights=WideLinear(
            read.get(f"{at}{INDEX_WEIGHTS}.weight", index.heads, hidden, dtype=torch.float32),
            lambda: ops.batch_invariant,
        ),
        cos_sin=context.cos_sin,
        input_norm=norm(INDEX_INPUT_NORM, hidden, index.norm_eps) if index.normed_inputs else None,
        scales=compose_scales(context, at, index.heads) if latent.head_scales else None,
    )
    kind = PagedPoolIndexer if index.paged_pools else PooledIndexer
    return made if not index.rate else _compose_pools(read, at, made, kind, index.rate, hidden)


def _compose_pools(
    read: WeightReader, at: str, of: Indexer, kind: type[PooledIndexer], rate: int, hidden: int
) -> PooledIndexer:
    dim = of.layout.dim
    return kind(
        **{field.name: getattr(of, field.name) for field in fields(Indexer)},
        gates=read.backend.linear(read.get(at + POOL_GATES, dim, hidden)),
        bias=read.get(at + POOL_BIAS, rate, dim, dtype=torch.float32),
    )


LATENT_LIKE = Architecture(LlamaDecoder, compose_layer)
