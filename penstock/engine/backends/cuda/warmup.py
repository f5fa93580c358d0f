"""Compiling every kernel before the first request.

One layer of each kind is taken through every shape that steps can have: all decode batch sizes, prompts short and
long, and both together. Nothing runs; the kernels asked for are compiled in parallel. Shapes and types decide which
kernels those are, not contents, so this needs no real cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.engine.adapters.runtime import AdaptedModel
from penstock.engine.backends.cuda.decode_graphs import buckets_up_to
from penstock.engine.backends.cuda.kernels.common import building_kernels
from penstock.engine.backends.cuda.kernels.grouped import GroupedWeight
from penstock.engine.backends.cuda.lora import TritonLora
from penstock.engine.backends.cuda.prompt_graphs import TOKENS
from penstock.engine.backends.interface import AttentionBatch, StateBatch, StepLimits, Xielu
from penstock.engine.grammar.interface import words_for
from penstock.engine.kv.cache import CacheShape, KVCache
from penstock.engine.models.decoder import Decoder, DecoderLayer
from penstock.engine.models.layers.attention import Attention
from penstock.engine.models.layers.block_attention import BlockAttention
from penstock.engine.models.layers.feed_forward import FeedForward
from penstock.engine.models.layers.latent_attention import LatentAttention
from penstock.engine.models.layers.mixer import TokenMixer
from penstock.engine.models.layers.side_by_side import SideBySide
from penstock.engine.models.layers.sparse_block_attention import SparseBlockAttention

_HELD = ("weight", "scale", "bias", "inner", "parts", "few")
"""Where linears keep what they multiply with."""
_PARTS = ("feed_forward", "routed", "shared")
"""The same of feed-forwards that are made of others."""


@torch.inference_mode()
def compile_kernels(
    decoder: Decoder,
    dtype: torch.dtype,
    limits: StepLimits,
    adapters: AdaptedModel | None = None,
    done: Collection[object] = (),
    wanted: Callable[[], bool] = lambda: True,
) -> Collection[object]:
    """Compile whatever the decoder may launch, with a cache of `dtype`; see `Backend.compile`."""
    device = decoder.embedding.device
    width = -(-limits.max_context // limits.block_size)
    tables = torch.zeros(limits.max_rows + 1, width, dtype=torch.int32, device=device)
    visited = set(done)
    with building_kernels(wanted):
        for layer in decoder.layers:
            kinds = _kinds_of(layer, decoder.fused_up_to)
            if not kinds <= visited:
                alone = decoder.alone(layer)
                _visit(alone, _cache_of(alone, dtype, limits), tables, limits)
                visited |= kinds
        for both in _neighbours(decoder):
            kinds = {tuple(frozenset(_kinds_of(layer, decoder.fused_up_to)) for layer in both)}
            if not kinds <= visited:
                pair = dataclasses.replace(decoder, layers=both)
                _forward(pair, _cache_of(pair, dtype, limits), tables, limits, 1, [])
                visited |= kinds
        if adapters is not None:
            for adapted in _one_layer_each(adapters):
                _visit_adapted(adapters, adapted, _cache_of(adapted, dtype, limits), tables, limits)
            _visit_ends(adapters, limits, device)
            altered = adapters.with_altered().altered
            if altered is not None and adapters.captures_altered and isinstance(adapters.kernel, TritonLora):
                for layer in _with_all_sites(altered, adapters, further=True):
                    alone = altered.alone(layer)
                    _visit_adapted(adapters, alone, _cache_of(alone, dtype, limits), tables, limits, altered=True)
    return visited


def _one_layer_each(adapters: AdaptedModel) -> list[Decoder]:
    """Linears are alike in all layers, but for those of experts, of delta nets, and of attention with other heads."""
    first, further = adapters.decoder, adapters.further
    layers = _with_all_sites(first, adapters, further=False)
    if further is not None and any(site.further and not site.end for site in adapters.layout.sites):
        layers += _with_all_sites(further, adapters, further=True)
    return [first.alone(layer) for layer in layers]


def _with_all_sites(decoder: Decoder, adapters: AdaptedModel, *, further: bool) -> list[DecoderLayer]:
    """The first layers that have, between them, every site that some layer has in a mixer of its kind."""
    layout = adapters.layout
    sites = [(at, site) for at, site in enumerate(layout.sites) if not site.end and (further or not site.further)]
    seen: set[object] = set()
    found = []
    for number, layer in zip(layout.runs or range(len(decoder.layers)), decoder.layers, strict=True):
        own = {(type(layer.mixer), at) for at, site in sites if site.is_in(number)}
        if own - seen:
            found.append(layer)
            seen |= own
    return found


def _neighbours(decoder: Decoder) -> Iterator[list[DecoderLayer]]:
    """Those that have products in one launch. As long as there is one layer, it stands for the next one, too."""
    if decoder.chained:
        layers = decoder.layers
        yield from ([first, second] for first, second in pairwise(layers if len(layers) > 1 else layers * 2))


def _kinds_of(layer: DecoderLayer, fused_up_to: int) -> set[object]:
    """What decides on the kernels of a layer: its parts, and how each of its matrices is stored. Files leave the first
    layers as they are, or give them more bits than others."""
    kind = _kind_of(layer.mixer), _form_of(layer.feed_forward), fused_up_to
    return {kind, *((kind, place, _stored(linear)) for place, linear in enumerate(layer.linears))}


def _stored(part: Any) -> object:
    """Equal for linears of one size that launch the same kernels."""
    if part is None:
        return None
    if isinstance(part, Tensor):
        return part.dtype
    if isinstance(part, tuple):
        return tuple(_stored(one) for one in part)
    if isinstance(part, GroupedWeight):
        return part.bits, part.group, part.has_minimum
    return type(part), tuple(_stored(getattr(part, name, None)) for name in _HELD)


def _kind_of(mixer: TokenMixer) -> object:
    """Equal for mixers that launch the same kernels."""
    if isinstance(mixer, LatentAttention):
        return type(mixer), mixer.heads, mixer.source is None
    return mixer.heads if isinstance(mixer, Attention) else type(mixer)


def _form_of(feed_forward: FeedForward) -> tuple[object, ...]:
    """The same of feed-forwards and their parts. Bounds are compiled in; numbers of Xielu, which layers have of their
    own, are not."""
    activation, own = (
        getattr(feed_forward, "activation", None),
        (type(feed_forward), getattr(feed_forward, "form", None)),
    )
    parts = (getattr(feed_forward, name) for name in _PARTS if hasattr(feed_forward, name))
    return *own, Xielu if isinstance(activation, Xielu) else activation, *map(_form_of, parts)


def _cache_of(decoder: Decoder, dtype: torch.dtype, limits: StepLimits) -> KVCache:
    """A cache for some of a decoder's layers: each has one of its own, also where it shares that of another layer."""
    kinds = list(decoder.cache_shape(limits.block_size, dtype).kinds)
    for index, layer in enumerate(decoder.layers):
        if isinstance(layer.mixer, Attention | LatentAttention) and layer.mixer.source is not None:
            kinds[index] = dataclasses.replace(layer.mixer, source=None).cache_kind(limits.block_size, dtype)
    shape = CacheShape(tuple(kinds), limits.block_size)
    return KVCache(shape, 2, decoder.embedding.device, num_states=limits.max_rows + 2)


def _visit_adapted(
    adapters: AdaptedModel, decoder: Decoder, kv: KVCache, tables: Tensor, limits: StepLimits, altered: bool = False
) -> None:
    """The same steps with adapters: tokens in all slots, in short and long chunks. `altered`: with vectors and norms,
    whose kernels do not depend on how many tokens there are."""

    def begin(tokens: int) -> None:
        adapters.kernel.begin(np.zeros(tokens, np.int32))
        if altered and isinstance(adapters.kernel, TritonLora):
            adapters.kernel.look_up_all()

    for decodes in (1, limits.max_rows) if altered else buckets_up_to(limits.max_rows):
        begin(decodes)
        _forward(decoder, kv, tables, limits, decodes, [])
    for prompts in ([17],) if altered else ([17], [limits.budget - 1], [20] * 4):
        begin(1 + sum(prompts))
        _forward(decoder, kv, tables, limits, 1, prompts)


def _visit_ends(adapters: AdaptedModel, limits: StepLimits, device: torch.device) -> None:
    """Adapters of embedding and head, where this rank has these."""
    further = adapters.further
    if further is None or further.embedded is None:
        return
    for tokens in (1, limits.max_rows, limits.budget):
        adapters.kernel.begin(np.zeros(tokens, np.int32))
        stream = further.embed(torch.zeros(tokens, dtype=torch.int64, device=device))
        if tokens <= limits.max_rows:
            further.head(stream.to(further.embedding.dtype))


def _visit(decoder: Decoder, kv: KVCache, tables: Tensor, limits: StepLimits) -> None:
    device, ops = kv.device, decoder.ops
    for decodes in buckets_up_to(limits.max_rows):
        logits = decoder.head(_forward(decoder, kv, tables, limits, decodes, []))
        keys, floats = torch.zeros(decodes, dtype=torch.int64, device=device), torch.zeros(decodes, device=device)
        ops.gumbel_argmax(logits, floats, keys)
        words = words_for(logits.shape[1])
        ops.mask_logits(logits.float(), keys, torch.zeros(decodes, words, dtype=torch.int32, device=device))
        for scores in (logits, logits.float()):
            ops.argmax(scores)
            ops.gumbel_argmax(scores, floats, keys, ops.filter_thresholds(scores, floats, keys, floats, floats))
    # Grouped experts are tiled by the number of tokens.
    sizes = [[1 << n] for n in range(2, limits.budget.bit_length())]
    sizes += [[count] for count in TOKENS if count <= limits.budget]
    for prompts in ([17], [limits.budget - 1], [20] * 4, *sizes):
        _forward(decoder, kv, tables, limits, 0, prompts)
        _forward(decoder, kv, tables, limits, 1, prompts)
    most = decoder.captured_context
    if most is not None and limits.max_context > most:
        for decodes in buckets_up_to(limits.max_rows):
            _forward(decoder, kv, tables, limits, decodes, [], longest=limits.max_context)
        for decodes in (0, 1):
            _forward(decoder, kv, tables, limits, decodes, [17], longest=limits.max_context)
    mixer, cache = decoder.layers[0].mixer, kv.layers[0]
    if not isinstance(mixer, Attention):
        for decodes in buckets_up_to(limits.max_rows):
            _forward(decoder, kv, tables, limits, decodes, [2])
    if isinstance(mixer, SideBySide):
        mixer, cache = mixer.attention, cache[0]
    elif isinstance(mixer, BlockAttention | SparseBlockAttention):
        cache = cache[0]
    if not isinstance(mixer, Attention):
        return
    heads = mixer.heads
    # Beside prompts there may be any number of decodes, not only those that have a graph.
    q = torch.zeros(limits.max_rows, heads.heads, heads.head_dim, dtype=decoder.embedding.dtype, device=device)
    for decodes in range(1, limits.max_rows + 1):
        batch = _batch(decodes, [], tables, limits)
        ops.attention(q[:decodes], heads, batch, cache.k, cache.v, cache.scales or mixer.kv_scales, mixer.sinks)


def _forward(
    decoder: Decoder,
    kv: KVCache,
    tables: Tensor,
    limits: StepLimits,
    decodes: int,
    prompts: list[int],
    longest: int | None = None,
) -> Tensor:
    """`longest`: as if some context were so long."""
    batch = _batch(decodes, _possible(prompts, limits), tables, limits)
    batch.longest = longest
    return decoder.forward(torch.zeros_like(batch.positions), batch, kv)


def _possible(prompts: list[int], limits: StepLimits) -> list[int]:
    """As many tokens in prompts that have room in a context: what runs beside kernels looks its blocks up."""
    most = limits.max_context
    return [min(most, count - begin) for count in prompts for begin in range(0, count, most)]


def _batch(decodes: int, prompts: list[int], tables: Tensor, limits: StepLimits) -> AttentionBatch:
    lengths = torch.tensor([1] * decodes + prompts, dtype=torch.int32, device=tables.device)
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=tables.device)
    starts[1:] = lengths.cumsum(0)
    first, last = (ends.repeat_interleave(lengths) for ends in (starts[:-1], starts[1:] - 1))
    nowhere = torch.zeros(decodes + sum(prompts), dtype=torch.int64, device=tables.device)
    return AttentionBatch(
        positions=nowhere,
        slots=nowhere,
        query_starts=starts,
        context_lens=lengths,
        rows=torch.zeros_like(lengths),
        block_tables=tables,
        num_decodes=decodes,
        max_query=max(prompts, default=1),
        max_context=limits.max_context,
        total_context=sum(prompts),
        attended=max(prompts, default=0) * sum(prompts),  # as behind a long prefix
        states=StateBatch(first, last, torch.zeros_like(first), torch.zeros_like(first)),
    )
