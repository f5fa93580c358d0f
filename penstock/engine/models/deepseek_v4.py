"""DeepSeek V4: attention to a window and to entries, experts, and several residual streams around both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch, CompressionLayout
from penstock.engine.kv.cache import KVCache
from penstock.engine.models.architecture import Architecture, LayerContext
from penstock.engine.models.attention_config import CompressionConfig
from penstock.engine.models.decoder import DecoderLayer
from penstock.engine.models.layers.compressed_attention import (
    CompressedAttention,
    EntryIndexer,
    EntryPool,
    PagedWindowAttention,
)
from penstock.engine.models.layers.experts import StepTokens
from penstock.engine.models.layers.hyper_connections import HyperConnection, StreamsHead, mean_of
from penstock.engine.models.layers.linear import WideLinear
from penstock.engine.models.layers.mixer import TokenMixer
from penstock.engine.models.llama import compose_feed_forward
from penstock.engine.models.model_config import StreamsConfig
from penstock.engine.models.streams import StreamsDecoder

INPUTS, QUERY_UP, KEY = "q_a_proj", "q_b_proj", "kv_proj"
OUTPUT_DOWN, OUTPUT = "o_a_proj", "o_b_proj"
POOL, INDEXER = "compressor.", "compressor.indexer."
VALUES, GATES, INDEX_WEIGHTS = "kv_proj", "gate_proj", "scorer.weights_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsLayer(DecoderLayer):
    """A layer among several streams."""

    around_mixer: HyperConnection
    around_feed_forward: HyperConnection
    tokens: StepTokens
    """What its router reads, where it looks experts up."""
    head: Callable[[Tensor], Tensor] | None
    """Behind the last layer of all."""


@dataclass(frozen=True, slots=True)
class DeepseekV4Decoder(StreamsDecoder):
    """See `StreamsDecoder`."""

    @property
    def told(self) -> list[StepTokens]:
        return [layer.tokens for layer in self._layers]

    def run(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        eps, dtype = self.config.rms_eps, self.embedding.dtype
        streams = residual.view(len(residual), -1, self.config.hidden_size)
        for layer, cache in zip(self._layers, kv.layers, strict=True):
            entered = layer.around_mixer.enter(streams)
            x = layer.mixer.ops.rms_norm(entered.x, layer.mixer_norm, eps, dtype)
            streams = entered.leave(layer.mixer.forward(x, batch, cache), streams)
            entered = layer.around_feed_forward.enter(streams)
            x = layer.feed_forward.ops.rms_norm(entered.x, layer.feed_forward_norm, eps, dtype)
            streams = entered.leave(layer.feed_forward.forward(x), streams)
        residual.copy_(streams.flatten(1))
        head = self._layers[-1].head
        out: Tensor = self.ops.rms_norm(streams[:, 0] if head is None else head(streams), self.final_norm, eps, dtype)
        return out

    @property
    def _layers(self) -> list[StreamsLayer]:
        layers: list[StreamsLayer] = self.layers  # type: ignore[assignment]
        return layers


def compose_layer(context: LayerContext) -> StreamsLayer:
    return compose_among_streams(context, compose_attention(context))


def compose_among_streams(context: LayerContext, mixer: TokenMixer) -> StreamsLayer:
    read, names, prefix, config = context.read, context.names, context.prefix, context.config
    tokens = StepTokens()
    last = context.index == config.num_layers - 1
    return StreamsLayer(
        mixer_norm=read.norm(prefix + names.mixer_norm, config.hidden_size),
        mixer=mixer,
        feed_forward_norm=read.norm(prefix + names.feed_forward_norm, config.hidden_size),
        feed_forward=compose_feed_forward(replace(context, inner=read.backend.ops), tokens),
        around_mixer=_connection(context, "attn_hc"),
        around_feed_forward=_connection(context, "ffn_hc"),
        tokens=tokens,
        head=_head(context) if last else None,
    )


def _streams(context: LayerContext) -> StreamsConfig:
    streams = context.config.streams
    assert streams is not None
    return streams


def _connection(context: LayerContext, name: str) -> HyperConnection:
    read, streams, at = context.read, _streams(context), f"{context.prefix}{name}."
    ops, n, kinds = read.backend.ops, streams.count, 3 if streams.rounds else 2
    widths = (n, n, n * n)[:kinds]
    size, scales = sum(widths), read.get(f"{at}scale", kinds, dtype=torch.float32)
    return HyperConnection(
        weight=read.get(f"{at}fn", size, streams.count * context.config.hidden_size, dtype=torch.float32),
        base=read.get(f"{at}base", size, dtype=torch.float32),
        scale=torch.cat([one.expand(width) for one, width in zip(scales, widths, strict=True)]),
        streams=streams,
        norm_eps=context.config.rms_eps,
        alone=lambda: ops.batch_invariant,
    )


def _head(context: LayerContext) -> Callable[[Tensor], Tensor]:
    read, streams, ops = context.read, _streams(context), context.read.backend.ops
    if streams.averaged:
        return mean_of
    at, count = f"{context.prefix.removesuffix(f'layers.{context.index}.')}hc_head.hc_", streams.count
    return StreamsHead(
        weight=read.get(f"{at}fn", count, count * context.config.hidden_size, dtype=torch.float32),
        base=read.get(f"{at}base", count, dtype=torch.float32),
        scale=read.get(f"{at}scale", 1, dtype=torch.float32),
        eps=streams.eps,
        norm_eps=context.config.rms_eps,
        alone=lambda: ops.batch_invariant,
    )


def compose_attention(context: LayerContext) -> CompressedAttention:
    read, config, shape = context.read, context.config, context.config.compression
    assert shape is not None
    prefix, hidden, dim = context.prefix + context.names.attention, config.hidden_size, config.head_dim
    rate, chosen, heads = shape.rates[context.index], shape.chosen[context.index], config.num_heads
    groups = shape.output_groups
    down = read.get(f"{prefix}{OUTPUT_DOWN}.weight", groups * shape.output_rank, heads * dim // groups)
    return (PagedWindowAttention if shape.paged_window else CompressedAttention)(
        ops=read.backend.ops,
        inputs=read.linear(prefix, {INPUTS: shape.query_rank, KEY: dim}, hidden),
        query_up=read.linear(prefix, {QUERY_UP: heads * dim}, shape.query_rank),
        output_down=down.view(groups, shape.output_rank, -1),
        output=read.linear(prefix, {OUTPUT: hidden}, groups * shape.output_rank),
        layout=CompressionLayout(heads, dim, shape.window, config.attention_scale, config.rms_eps, rate, chosen),
        query_norm=read.norm(f"{prefix}q_a_norm", shape.query_rank),
        key_norm=read.norm(f"{prefix}kv_norm", dim),
        sinks=read.get(f"{prefix}sinks", heads, dtype=torch.float32),
        cos_sin=context.cos_sin,
        pool=_pool(context, prefix + POOL, rate, dim, chosen) if rate else None,
        indexer=_indexer(context, prefix + INDEXER, shape, rate) if chosen else None,
        cache_scale=torch.ones(1, device=read.backend.device) if context.fp8_cache else None,
    )


def _pool(context: LayerContext, at: str, rate: int, dim: int, overlapping: bool) -> EntryPool:
    # Entries stand for many tokens, and checkpoints do not store what makes them in few bits.
    read, width = context.read.dense(), 2 * dim if overlapping else dim
    return EntryPool(
        linear=read.linear(at, {VALUES: width, GATES: width}, context.config.hidden_size),
        bias=read.get(f"{at}position_bias", rate, width, dtype=torch.float32),
        norm=read.norm(f"{at}kv_norm", dim),
    )


def _indexer(context: LayerContext, at: str, shape: CompressionConfig, rate: int) -> EntryIndexer:
    read, heads, dim = context.read, shape.index_heads, shape.index_dim
    weights, ops = f"{at}{INDEX_WEIGHTS}.weight", read.backend.ops
    return EntryIndexer(
        pool=_pool(context, at, rate, dim, True),
        queries=read.linear(at, {QUERY_UP: heads * dim}, shape.query_rank),
        head_weights=WideLinear(
            read.get(weights, heads, context.config.hidden_size, dtype=torch.float32), lambda: ops.batch_invariant
        ),
        most=shape.most,
    )


DEEPSEEK_V4_LIKE = Architecture(DeepseekV4Decoder, compose_layer)
