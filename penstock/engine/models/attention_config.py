"""Attention that keeps less than whole keys and values, or reads less than everything. See `ModelConfig`."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """Attention to few tokens that an indexer chooses (DSA): see `IndexLayout`."""

    heads: int
    dim: int
    most: int
    """Tokens that are chosen; up to so many all are."""
    interleaved: bool
    layers: tuple[bool, ...]
    """Which layers have an indexer. The others attend to what the last one before them chose."""
    rotates_last: bool = False
    """Whether the last dimensions of its heads are rotated, not the first."""
    norm_eps: float = 1e-6
    """Of the norm of its keys."""
    normed_inputs: bool = False
    """Whether its queries are made of what the layer reads, behind a LayerNorm, not of the vector that queries of
    attention are made of."""
    rate: int = 0
    """Tokens that are chosen together (see `PooledIndexOps`), by which `most` can be divided; 0: each by itself."""
    paged_pools: bool = False
    """Whether what pools are made of lies in blocks, not in a state: of a drafter's layer, which has no states."""

    @property
    def everything(self) -> int:
        """The longest context of which a token sees all, itself included."""
        return self.most + max(0, self.rate - 1)


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Attention over latents (MLA): see `LatentLayout`. The model then has one KV head, the latent's."""

    query_rank: int | None
    """Width that queries are projected through; None: they are projected at once."""
    rank: int
    """Width of a latent."""
    plain: int
    rotary: int
    value: int
    """Dimensions of a head: of its query and key that are not rotated, that are, and of its value."""
    interleaved: bool
    norm_eps: float
    """Of the norms between the projections."""
    input_bias: bool = False
    """Whether the projections down have a bias."""
    index: IndexConfig | None = None
    """None: tokens attend to everything."""
    gated_queries: bool = False
    """Whether queries come from the narrower vector with its norm and without, and a gate of the head's output behind
    each query."""
    gate_rank: int = 0
    """Of the gates behind the norms of layers; 0: there are none."""
    unrotated: tuple[bool, ...] = ()
    """In which layers, and their indexers, nothing is rotated: the `rotary` dimensions of a head are plain ones there,
    and latents alone are cached. Empty: in none."""
    sources: tuple[int, ...] = ()
    """The layer whose latents each layer attends to; empty: its own, everywhere. A source has its own."""
    head_scales: bool = False
    """Whether queries of every head, those of indexers too, have a factor that grows with the logarithm of their
    position."""

    def rotary_in(self, layer: int) -> int:
        """Dimensions that a layer rotates."""
        return 0 if self.unrotated and self.unrotated[layer] else self.rotary

    def plain_in(self, layer: int) -> int:
        return self.plain + self.rotary - self.rotary_in(layer)

    def cached_in(self, layer: int) -> int:
        """Numbers that a layer, or its source, caches of a token beside index keys."""
        return self.rank + self.rotary_in(layer)

    def shares(self, layer: int) -> bool:
        """Whether a layer attends to the latents of another."""
        return bool(self.sources) and self.sources[layer] != layer

    @property
    def pooled(self) -> bool:
        """Whether tokens are chosen together, so that layers with an indexer keep a state."""
        return self.index is not None and self.index.rate > 0 and not self.index.paged_pools

    @property
    def uniform(self) -> bool:
        """Whether all layers keep latents of one width."""
        return not self.unrotated and not self.sources

    def stage(self, first: int, last: int) -> LatentConfig:
        """Of some layers, none of which attends to latents of those before."""
        index = self.index
        return replace(
            self,
            index=None if index is None else replace(index, layers=index.layers[first:last]),
            unrotated=self.unrotated[first:last],
            sources=tuple(source - first for source in self.sources[first:last]),
        )


@dataclass(frozen=True, slots=True)
class CompressionConfig:
    """Attention to a window and to entries that stand for several tokens: see `CompressionLayout`. Keys are values, and
    there is one for all heads."""

    rates: tuple[int, ...]
    """Of each layer: tokens of an entry; 0 where there is the window alone."""
    chosen: tuple[bool, ...]
    """Which layers have an indexer. There the groups overlap."""
    window: int
    query_rank: int
    """Width that queries are projected through."""
    output_groups: int
    """Runs of heads whose outputs are projected by themselves."""
    output_rank: int
    """What each run is projected to, before all of them are projected together."""
    index_heads: int
    index_dim: int
    most: int
    """Entries that are chosen; up to so many all are."""
    paged_window: bool = False
    """Whether keys lie in blocks, where there is the window alone: of a drafter's layer, which has no states."""


@dataclass(frozen=True, slots=True)
class BlockIndexConfig:
    """Attention to blocks of tokens that an indexer chooses (QSA): see `BlockIndexLayout`."""

    heads: int
    dim: int
    rate: int
    most: int


@dataclass(frozen=True, slots=True)
class SparseBlockConfig:
    """Attention to blocks of the context that an indexer chooses for every KV head (MSA): see `SparseBlockLayout`."""

    layers: tuple[bool, ...]
    """Which layers have an indexer; the others see everything."""
    heads: int
    dim: int
    rate: int
    most: int
    local: int


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Attention temperature: the query at position p is multiplied by 1 + strength * log(1 + floor((p + offset) /
    period)), so that softmaxes over long contexts stay sharp."""

    period: float
    strength: float
    offset: float = 1.0
    everywhere: bool = False
    """In all layers, not only in those without rotary embedding."""
