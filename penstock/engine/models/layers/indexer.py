"""The indexer of a layer: what chooses the cached tokens that attention over latents sees (DSA).

Its key of every token is cached beside the latents, whether or not something has to be chosen yet. Queries and the
weights of its heads are made only when a context is longer than what may be chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import AttentionBatch, Chosen, HeadScales, IndexLayout, IndexNorm, Ops
from penstock.engine.models.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class Indexer:
    """Reads what its layer's attention reads."""

    ops: Ops
    layout: IndexLayout
    keys: Linear
    norm: IndexNorm
    queries: Linear
    """From the narrow vector that the queries of attention are made of, or with `input_norm` from what the layer
    reads."""
    head_weights: Linear
    cos_sin: Tensor
    input_norm: IndexNorm | None = None
    scales: HeadScales | None = None
    """Of queries."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.keys, self.queries

    def store(self, x: Tensor, batch: AttentionBatch, cache: Tensor) -> None:
        self.ops.store_index_keys(self.keys(x), self.norm, self.layout, self.cos_sin, batch, cache)

    def choose(
        self, x: Tensor, narrow: Tensor, batch: AttentionBatch, cache: Tensor, block_size: int, *, every: bool
    ) -> Chosen:
        """`narrow`: see `queries`; `every`: see `IndexOps.choose_tokens`."""
        if self.input_norm is not None:
            weight, bias, eps = self.input_norm
            narrow = F.layer_norm(x, (x.shape[1],), weight, bias, eps)
        queries, weights = self.queries(narrow), self.head_weights(x)
        if self.scales is not None:
            queries = self.ops.scale_heads(queries, batch.positions, self.scales)
        return self.ops.choose_tokens(
            queries, weights, self.layout, self.cos_sin, batch, cache, block_size, every=every
        )
