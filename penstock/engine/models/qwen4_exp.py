"""Qwen4: several residual streams around gated delta nets, gated attention to chosen blocks, and experts; some layers
are told of the last tokens by their ids."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch, BlockIndexLayout
from penstock.engine.kv.cache import CacheShape, KVCache
from penstock.engine.kv.kinds import BothKinds
from penstock.engine.models.architecture import Architecture, LayerContext
from penstock.engine.models.decoder import Decoder, DecoderLayer
from penstock.engine.models.layers.block_attention import BlockAttention, BlockIndexer
from penstock.engine.models.layers.experts import StepTokens
from penstock.engine.models.layers.gated_streams import GatedStreams
from penstock.engine.models.layers.mixer import TokenMixer
from penstock.engine.models.layers.ngrams import NgramInput, NgramTable
from penstock.engine.models.llama import compose_feed_forward
from penstock.engine.models.model_config import NgramConfig
from penstock.engine.models.ngram_hash import head_sizes, multipliers, table_rows
from penstock.engine.models.qwen3_next import compose_delta_net, gated_attention_parts
from penstock.engine.models.streams import StreamsDecoder

MIXER_STREAMS, FEED_FORWARD_STREAMS, LAST_STREAMS = (
    "attn_hyper_connection",
    "mlp_hyper_connection",
    "hyper_connection_mixer",
)
INDEXER, INDEX_INPUTS = "indexer.", "index_qk_proj"
NGRAMS, TABLE = "ple.", "ple.ple_embedding."


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedStreamsLayer(DecoderLayer):
    """A layer among several streams. Its norms are those of the streams."""

    around_mixer: GatedStreams
    around_feed_forward: GatedStreams
    ngrams: NgramInput | None
    last: GatedStreams | None
    """Behind the last layer of all."""


@dataclass(frozen=True, slots=True)
class Qwen4ExpDecoder(StreamsDecoder):
    """See `StreamsDecoder`."""

    @property
    def told(self) -> list[StepTokens]:
        return [layer.ngrams.tokens for layer in self._layers if layer.ngrams is not None]

    def run(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        dtype = self.embedding.dtype
        for layer, given in zip(self._layers, kv.layers, strict=True):
            cache = given
            if layer.ngrams is not None:
                cache, kept = given
                layer.ngrams.add(residual, batch, kept)
            x, factors = layer.around_mixer.enter(residual, dtype)
            layer.around_mixer.leave(layer.mixer.forward(x, batch, cache), factors, residual)
            x, factors = layer.around_feed_forward.enter(residual, dtype)
            layer.around_feed_forward.leave(layer.feed_forward.forward(x), factors, residual)
        last = self._layers[-1].last
        return residual[:, : self.config.hidden_size] if last is None else last.enter(residual, dtype)[0]

    def cache_shape(self, block_size: int, dtype: torch.dtype) -> CacheShape:
        kinds = []
        for layer in self._layers:
            kind = layer.mixer.cache_kind(block_size, dtype)
            kinds.append(kind if layer.ngrams is None else BothKinds(kind, layer.ngrams.cache_kind()))
        return CacheShape(tuple(kinds), block_size)

    @property
    def weight_bytes(self) -> int:
        total = Decoder.weight_bytes.__get__(self)
        for layer in self._layers:
            parts = (layer.around_mixer, layer.around_feed_forward, layer.ngrams, layer.last)
            total += sum(part.weight_bytes for part in parts if part is not None)
        return int(total)

    @property
    def _layers(self) -> list[GatedStreamsLayer]:
        layers: list[GatedStreamsLayer] = self.layers  # type: ignore[assignment]
        return layers


def compose_layer(context: LayerContext) -> GatedStreamsLayer:
    # Streams are normalized by operations of their own, so that parts read plain numbers.
    context = replace(context, inner=context.read.backend.ops)
    config, prefix, index = context.config, context.prefix, context.index
    assert config.delta is not None and config.ngrams is not None
    recurrent, last = config.delta.layers[index], index == config.num_layers - 1
    mixer: TokenMixer = compose_delta_net(context) if recurrent else compose_attention(context)
    end = f"{prefix.removesuffix(f'layers.{index}.')}{LAST_STREAMS}."
    return GatedStreamsLayer(
        mixer_norm=None,
        mixer=mixer,
        feed_forward_norm=None,
        feed_forward=compose_feed_forward(context),
        around_mixer=_streams(context, f"{prefix}{MIXER_STREAMS}."),
        around_feed_forward=_streams(context, f"{prefix}{FEED_FORWARD_STREAMS}."),
        ngrams=None if config.ngrams.layers[index] is None else compose_ngrams(context, config.ngrams),
        last=_streams(context, end, last=True) if last else None,
    )


def compose_attention(context: LayerContext) -> BlockAttention:
    read, config = context.read, context.config
    index = config.block_index
    assert index is not None
    at = f"{context.prefix}{context.names.attention}{INDEXER}"
    return BlockAttention(
        **gated_attention_parts(context),
        indexer=BlockIndexer(
            linear=read.linear(at, {INDEX_INPUTS: (index.heads + 1) * index.dim}, config.hidden_size),
            query_norm=read.norm(f"{at}q_layernorm", index.dim),
            key_norm=read.norm(f"{at}k_layernorm", index.dim),
            layout=BlockIndexLayout(index.heads, index.dim, index.rate, index.most, config.rms_eps),
            dtype=read.dtype,
        ),
    )


def _streams(context: LayerContext, at: str, *, last: bool = False) -> GatedStreams:
    # Gates of a whole layer: checkpoints do not store them in few bits.
    read, config, ops = context.read.dense(), context.config, context.read.backend.ops
    streams = config.streams
    assert streams is not None
    count, width = streams.count, streams.count * config.hidden_size
    return GatedStreams(
        norm=read.norm(f"{at}hc_norm", width).float(),
        down=read.linear(at, {"input_mix_weight_down": streams.rank}, width),
        up=read.linear(at, {"input_mix_weight_up": width}, streams.rank),
        factors=None if last else read.linear(at, {"block_inject_weight": count}, width),
        count=count,
        eps=config.rms_eps,
        alone=lambda: ops.batch_invariant,
    )


def compose_ngrams(context: LayerContext, ngrams: NgramConfig) -> NgramInput:
    read, config, streams, ops = context.read.dense(), context.config, context.config.streams, context.read.backend.ops
    assert streams is not None
    at, width = f"{context.prefix}{NGRAMS}", streams.count * config.hidden_size
    conv = read.get(f"{at}conv1d.weight", width, 1, ngrams.taps, dtype=torch.float32)
    return NgramInput(
        table=_table(context, ngrams),
        tokens=StepTokens(),
        key=read.linear(at, {"key_proj": width}, ngrams.width),
        value=read.linear(at, {"value_proj": config.hidden_size}, ngrams.width),
        key_norm=read.norm(f"{at}norm_key", width).float(),
        query_norm=read.norm(f"{at}norm_query", width).float(),
        conv_norm=read.norm(f"{at}norm_conv", width).float(),
        conv=conv.view(width, ngrams.taps),
        config=ngrams,
        hidden=config.hidden_size,
        eps=config.rms_eps,
        dtype=read.dtype,
        alone=lambda: ops.batch_invariant,
    )


def _table(context: LayerContext, ngrams: NgramConfig) -> NgramTable:
    read, at, device = context.read, f"{context.prefix}{TABLE}", context.read.backend.device
    index = ngrams.layers[context.index]
    assert index is not None
    sizes = head_sizes(ngrams, index)
    offsets = [sum(sizes[:head]) for head in range(len(sizes))]

    def numbers(name: str, computed: list[int]) -> Tensor:
        """Checkpoints have what the reference computed when it wrote them, or leave it out."""
        stored = f"{at}{name}"
        if read.stores(stored):
            return read.get(stored, len(computed), dtype=torch.int64)
        return torch.tensor(computed, dtype=torch.int64, device=device)

    width = ngrams.width // ngrams.all_heads
    return NgramTable(
        parts=read.host_rows(f"{at}ngram_embedding", table_rows(ngrams, index), width, ngrams.parts),
        factors=numbers("layer_multipliers", multipliers(ngrams, context.config.vocab_size, index)),
        sizes=numbers("ngram_heads_vocab_sizes", sizes),
        offsets=numbers("ngram_heads_offsets", offsets),
        heads=ngrams.heads,
        end=ngrams.end,
    )


QWEN4_EXP_LIKE = Architecture(Qwen4ExpDecoder, compose_layer)
