"""Which part of every block and of every state each rank has of a model whose layers keep things of several kinds.

Keys and values are cut by heads and the states of delta nets as their weights are; everything else every shard has
whole: entries, index keys, windows, what is known of the last tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod

from penstock.engine.backends.interface import INT8, SCALE_DTYPE
from penstock.engine.kv.block_part import BlockPart, Span, TensorPart
from penstock.engine.kv.cache import CacheShape
from penstock.engine.kv.kinds import (
    BothKinds,
    CacheKind,
    OfLayer,
    PagedEntries,
    PagedKV,
    PagedLatent,
    PagedRows,
    RecurrentState,
    StateTensors,
)
from penstock.engine.models.attention_config import LatentConfig
from penstock.engine.models.layers import compressed_attention, ngrams
from penstock.engine.models.layers.block_attention import with_index_keys
from penstock.engine.models.layers.indexer import pool_keys_kind
from penstock.engine.models.layers.sparse_block_attention import with_token_keys
from penstock.engine.parallel.cache_parts import CacheParts
from penstock.engine.parallel.layout import Place, even_span, kv_head_span, stage_span
from penstock.engine.parallel.part_runs import PartInRuns, Run, joined, with_rows

_ALL: tuple[Span, ...] = ((0, 1),)
"""Of what no shard has a part of."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """One tensor of a layer: what it has in every block, or state."""

    units: int
    spans: tuple[Span, ...]
    """Those of a rank."""
    rows: int
    unit_bytes: int
    gives: bool

    def part(self, layers: int, at: int) -> TensorPart:
        """Of the layer `at` among so many of its kind."""
        return TensorPart(layers, self.units, (at, at + 1), self.spans, self.rows, self.unit_bytes, self.gives)

    def all(self, layers: int) -> TensorPart:
        return replace(self.part(layers, 0), layers=(0, layers), units=((0, self.units),))


@dataclass(frozen=True, slots=True)
class KindParts(CacheParts):
    """See `CacheParts`."""

    def blocks(self, place: Place) -> BlockPart:
        found = self._part(place, states=False)
        return found if self.rows is None else with_rows(found, self._rows(self.rows, place))

    def states(self, place: Place) -> BlockPart:
        return self._part(place, states=True)

    def whole(self) -> CacheShape:
        return self._shape(self._kinds())

    def _kinds(self) -> tuple[CacheKind, ...]:
        """Of the layers of the whole model."""
        return tuple(self._kind(layer) for layer in range(self.model.num_layers))

    def _kind(self, layer: int) -> CacheKind:
        model, size, made = self.model, self.block_size, self.dtype
        shape, index, told = model.compression, model.block_index, model.ngrams
        if shape is not None:
            index_dim = shape.index_dim if shape.chosen[layer] else 0
            window, rate = shape.window, shape.rates[layer]
            return compressed_attention.kept_kind(window, model.head_dim, rate, index_dim, size, self.kv_dtype, made)
        if model.latent is not None:
            return self._latents(model.latent, layer)
        kind: CacheKind = PagedKV(model.num_kv_heads, model.head_dim, size, self.kv_dtype)
        sparse = model.sparse_blocks
        if sparse is not None:
            return with_token_keys(kind, sparse.dim, size, made) if sparse.layers[layer] else kind
        assert index is not None
        kind = self._state() if self._recurrent[layer] else with_index_keys(kind, index.dim, index.rate, size, made)
        if told is None or told.layers[layer] is None:
            return kind
        assert model.streams is not None
        return BothKinds(kind, ngrams.kept_kind(told, model.streams.count * model.hidden_size, made))

    def _latents(self, latent: LatentConfig, layer: int) -> CacheKind:
        size, index = self.block_size, latent.index
        if self._recurrent[layer]:
            return self._state()
        kept: CacheKind = PagedLatent(latent.cached_in(layer), size, self.kv_dtype)
        if latent.shares(layer):
            kept = OfLayer(latent.sources[layer])
        if index is None or not index.layers[layer]:
            return kept
        if index.rate:
            return BothKinds(kept, pool_keys_kind(index.dim, index.rate, size, self.dtype))
        return BothKinds(kept, PagedRows(index.dim, size, self.dtype))

    def _part(self, place: Place, *, states: bool) -> PartInRuns:
        """Caches have the tensors of each kind one after the other, in the order of the kinds' first layers."""
        kinds, here = self._kinds(), range(*stage_span(self.model, place))
        pieces = {kind: self._pieces(kind, place, states=states) for kind in dict.fromkeys(kinds)}
        counts, own_counts = Counter(kinds), Counter(kinds[layer] for layer in here)
        first, own_first = (_numbered(order, pieces) for order in (counts, own_counts))
        runs = []
        for index, layer in enumerate(here):
            kind = kinds[layer]
            at, own_at = kinds[:layer].count(kind), [kinds[other] for other in here[:index]].count(kind)
            for tensor, piece in enumerate(pieces[kind]):
                part = piece.part(counts[kind], at)
                span = own_at * part.own_bytes, (own_at + 1) * part.own_bytes
                runs.append(Run(first[kind] + tensor, own_first[kind] + tensor, span, part))
        whole = tuple(piece.all(count) for kind, count in counts.items() for piece in pieces[kind])
        own_bytes = tuple(
            count * piece.part(count, 0).own_bytes for kind, count in own_counts.items() for piece in pieces[kind]
        )
        return PartInRuns(whole, joined(runs), own_bytes)

    def _pieces(self, kind: CacheKind, place: Place, *, states: bool) -> list[_Piece]:
        """The tensors of a layer that blocks consist of, or states."""
        if isinstance(kind, BothKinds):
            return [piece for part in (kind.first, kind.second) for piece in self._pieces(part, place, states=states)]
        first = place.data or place.shard == 0
        if isinstance(kind, StateTensors):
            counts = Counter(kind.parts).items() if states else ()
            return [_Piece(1, _ALL, count, prod(shape) * dtype.itemsize, first) for (shape, dtype), count in counts]
        if isinstance(kind, RecurrentState):
            if not states:
                return []
            heads, matrix = (even_span(kind.heads, place),), 4 * kind.rows * kind.columns
            inputs = _Piece(kind.channels, self._channels(place), kind.width, kind.dtype.itemsize, gives=True)
            return [_Piece(kind.heads, heads, 1, matrix, gives=True), inputs]
        if states or isinstance(kind, OfLayer):
            return []
        if isinstance(kind, PagedKV):
            span = kv_head_span(self.model, place)
            earlier = (replace(place, rank=shard) for shard in range(place.shard))
            gives = place.data or all(kv_head_span(self.model, other) != span for other in earlier)
            sizes = [kind.block_size * kind.head_dim * kind.dtype.itemsize]
            sizes += [kind.block_size * SCALE_DTYPE.itemsize] * (kind.dtype == INT8)
            return [_Piece(kind.kv_heads, (span,), 2, size, gives) for size in sizes]
        assert isinstance(kind, PagedEntries | PagedLatent | PagedRows)
        places = -(-kind.block_size // kind.rate) if isinstance(kind, PagedEntries) else kind.block_size
        sizes = [places * kind.width * kind.dtype.itemsize]
        sizes += [places * SCALE_DTYPE.itemsize] * (not isinstance(kind, PagedRows) and kind.dtype == INT8)
        return [_Piece(1, _ALL, 1, size, first) for size in sizes]


def _numbered(kinds: Counter[CacheKind], pieces: dict[CacheKind, list[_Piece]]) -> dict[CacheKind, int]:
    """The place of each kind's first tensor among those of a cache."""
    found, at = {}, 0
    for kind in kinds:
        found[kind], at = at, at + len(pieces[kind])
    return found
