"""Hidden states of a model for a drafter: taken while a step runs, and kept beside the keys and values of its tokens.

They lie in the blocks of the KV cache, as one layer more: whatever brings back a block (a shared prefix, the host tier,
another engine) brings back what the drafter needs of it, and what preemption or a rejected draft token makes stale is
written again with the keys and values.

A decoder adds to the residual stream in place, so it can be cut between any two layers: the parts run one after the
other on the same stream, and it is read between them. A decoder without a drafter is not touched by any of this.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch, Ops
from penstock.engine.kv.cache import CacheShape, KVCache
from penstock.engine.kv.kinds import PagedRows
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class Tap:
    """Which hidden states a drafter wants."""

    width: int
    """Of what is kept of a token."""
    ops: Ops
    layers: tuple[int, ...] = ()
    """The residual stream in front of these layers, ascending; none: the final hidden states."""
    project: Linear | None = None
    """Applied to the chosen streams side by side; None: what is kept are the final hidden states."""

    def on(self, decoder: Decoder) -> TappedDecoder:
        """`decoder`, writing them for every token."""
        ends = sorted({*self.layers, len(decoder.layers)} - {0})
        parts = [replace(decoder, layers=decoder.layers[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
        own = {field.name: getattr(decoder, field.name) for field in fields(Decoder)}
        return TappedDecoder(**own, inner=decoder, tap=self, parts=tuple(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class TappedDecoder(Decoder):
    """See `Tap`. The last layer of its cache is what it keeps for the drafter."""

    inner: Decoder
    tap: Tap
    parts: tuple[Decoder, ...]
    """The layers between two places that are read."""

    def run(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        ops, wanted, project = self.tap.ops, self.tap.layers, self.tap.project
        count, width = residual.shape
        size = count, len(wanted) * width
        taken = torch.empty(size, dtype=self.embedding.dtype, device=residual.device)
        if 0 in wanted:
            ops.store_rows(residual, taken[:, :width])
        hidden, end = residual, 0
        for part in self.parts:
            begin, end = end, end + len(part.layers)
            hidden = part.run(residual, batch, kv.of_layers(begin, end))
            if end in wanted:
                at = wanted.index(end) * width
                ops.store_rows(residual, taken[:, at : at + width])
        ops.store_rows(hidden if project is None else project(taken), kv.layers[-1], batch.slots)
        return hidden

    @property
    def launched_eagerly(self) -> bool:
        return self.inner.launched_eagerly

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.inner.embed(token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.inner.logits(hidden)

    def cache_shape(self, block_size: int, dtype: torch.dtype) -> CacheShape:
        shape = self.inner.cache_shape(block_size, dtype)
        return replace(shape, kinds=(*shape.kinds, PagedRows(self.tap.width, block_size, self.embedding.dtype)))
