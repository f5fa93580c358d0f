"""Which part of every block each rank has of a model whose layers may differ in the number and the size of their heads.

Of a family the configuration says what they keep (`sites_of`). Of a model that the `transformers` library runs it is
found when it is loaded: one entry for every attention call, and each stage has seen its own layers only. So the ranks
tell each other (`agreed_sites`) before any of them gives or takes a block. Whole blocks are as one device would have
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from penstock.engine.backends.interface import INT8, SCALE_DTYPE
from penstock.engine.kv.block_part import BlockPart, Span, TensorPart
from penstock.engine.kv.cache import CacheShape
from penstock.engine.kv.kinds import PagedKV, PagedRows
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.transformers.attention import Site
from penstock.engine.parallel.cache_parts import CacheParts
from penstock.engine.parallel.kind_parts import KindParts
from penstock.engine.parallel.layout import Place, given_keys, stage_span
from penstock.engine.parallel.part_runs import PartInRuns, Run, joined, with_rows

if TYPE_CHECKING:
    from penstock.engine.startup.part import Part

_NONE = (1 << 62) - 1
"""Of a rank that does not know a number: larger than any."""
_BITS = 20


@dataclass(frozen=True, slots=True)
class SiteShape:
    """What one attention call of the whole model keeps of a token."""

    stage: int
    kv_heads: int
    head_dim: int
    parts: int
    """Into how many the KV heads are divided; shards next to each other have the same part where these are fewer."""

    def span(self, place: Place) -> Span:
        """The KV heads that the shard of `place` has."""
        size = self.kv_heads // self.parts
        part = self._part(place.shard, place.tensor)
        return part * size, (part + 1) * size

    def gives(self, place: Place) -> bool:
        """Whether it is this shard that supplies them for whole blocks."""
        earlier = range(place.shard)
        return place.data or all(self._part(s, place.tensor) != self._part(place.shard, place.tensor) for s in earlier)

    def _part(self, shard: int, shards: int) -> int:
        return shard * self.parts // shards

    def kind(self, block_size: int, dtype: torch.dtype, *, place: Place | None = None) -> PagedKV:
        """As one device has it, or the rank at `place`."""
        heads = self.kv_heads if place is None else self.kv_heads // self.parts
        return PagedKV(heads, self.head_dim, block_size, dtype)


def agreed_sites(own: list[Site], place: Place, least: Callable[[int], int]) -> tuple[SiteShape, ...]:
    """What all stages keep, in the order of the model's layers. Every rank calls this at the same point; `least`: the
    smallest number that any of them names."""
    found = []
    for stage in range(place.pipeline):
        mine = own if stage == place.stage else None
        for index in range(least(_NONE if mine is None else len(mine))):
            packed = least(_NONE if mine is None else _packed(mine[index]))
            mask = (1 << _BITS) - 1
            found.append(SiteShape(stage, packed >> 2 * _BITS, packed >> _BITS & mask, packed & mask))
    return tuple(found)


def _packed(site: Site) -> int:
    return (site.heads.kv_heads * site.parts << 2 * _BITS) + (site.heads.head_dim << _BITS) + site.parts


@dataclass(frozen=True, slots=True)
class SiteParts(CacheParts):
    """See `CacheParts`."""

    sites: tuple[SiteShape, ...] = ()

    def _here(self, place: Place) -> list[int]:
        """Which of them the stage of `place` keeps, in the order of its layers: its own, and those of earlier stages to
        which its layers attend."""
        order, begin = self.model.key_sources, stage_span(self.model, place)[0]
        if self.model.by_transformers or not order:
            return [index for index, site in enumerate(self.sites) if site.stage == place.stage]
        keepers = [layer for layer, source in enumerate(order) if layer == source]
        found = []
        for layer, given in enumerate(given_keys(self.model, place), begin):
            if given is not None or order[layer] == layer:
                found.append(keepers.index(order[layer]))
        return found

    def whole(self) -> CacheShape:
        return self._shape(site.kind(self.block_size, self.kv_dtype) for site in self.sites)

    def blocks(self, place: Place) -> BlockPart:
        size, dtype = self.block_size, self.kv_dtype
        kinds = [site.kind(size, dtype) for site in self.sites]
        order = list(dict.fromkeys(kinds))
        # A cache has the tensors of each kind one after the other: values, and in int8 their scales.
        tensors = 2 if dtype == INT8 else 1
        whole = [part for kind in order for part in self._tensors(kind, kinds.count(kind))]
        here = self._here(place)
        own_kinds = [self.sites[at].kind(size, dtype, place=place) for at in here]
        own_order = list(dict.fromkeys(own_kinds))
        runs: list[Run] = []
        for index, (among, own) in enumerate(zip(here, own_kinds, strict=True)):
            site, kind = self.sites[among], kinds[among]
            at, own_at = kinds[:among].count(kind), own_kinds[:index].count(own)
            for tensor in range(tensors):
                part = replace(
                    whole[order.index(kind) * tensors + tensor],
                    layers=(at, at + 1),
                    units=(site.span(place),),
                    gives=site.stage == place.stage and site.gives(place),
                )
                length = part.own_bytes
                runs.append(
                    Run(
                        order.index(kind) * tensors + tensor,
                        own_order.index(own) * tensors + tensor,
                        (own_at * length, (own_at + 1) * length),
                        part,
                    )
                )
        own_bytes = [part.whole_bytes for kind in own_order for part in self._tensors(kind, own_kinds.count(kind))]
        found = PartInRuns(tuple(whole), joined(runs), tuple(own_bytes))
        return found if self.rows is None else with_rows(found, self._rows(self.rows, place))

    def _tensors(self, kind: PagedKV, layers: int) -> list[TensorPart]:
        sizes = [self.block_size * kind.head_dim * kind.dtype.itemsize]
        sizes += [self.block_size * SCALE_DTYPE.itemsize] * (kind.dtype == INT8)
        return [TensorPart(layers, kind.kv_heads, (0, layers), ((0, kind.kv_heads),), 2, each) for each in sizes]


def sites_of(model: ModelConfig, place: Place) -> tuple[SiteShape, ...]:
    """Of a family whose layers differ in their heads; none where they do not."""
    found = []
    for index, (kv_heads, dim) in enumerate(model.layer_heads):
        if model.source_of(index) == index:
            stages = (replace(place, rank=stage * place.tensor) for stage in range(place.pipeline))
            spans = (stage_span(model, stage) for stage in stages)
            stage = next(stage for stage, (first, last) in enumerate(spans) if first <= index < last)
            found.append(SiteShape(stage, kv_heads, dim, 1 if place.data else min(kv_heads, place.tensor)))
    return tuple(found)


def cache_parts(part: Part, place: Place) -> CacheParts:
    """Of the model of which `part` is the rank's at `place`."""
    last = part.kv.shape.kinds[-1]
    rows = last if isinstance(last, PagedRows) else None
    sites = part.sites or sites_of(part.model, place)
    sizes = part.model, part.kv.block_size, part.kv_dtype, part.decoder.embedding.dtype, rows
    if sites:
        return SiteParts(*sizes, sites=sites)
    model = part.model
    several = (model.compression, model.block_index, model.sparse_blocks) != (None, None, None)
    several = several or (model.latent is not None and (model.latent.pooled or not model.latent.uniform))
    return KindParts(*sizes) if several else CacheParts(*sizes)
