"""Hidden states of a model for a drafter: taken while a step runs, and kept beside the keys and values of its tokens.

They lie in the blocks of the KV cache, as one layer more: whatever brings back a block (a shared prefix, the host tier,
another engine) brings back what the drafter needs of it, and what preemption or a rejected draft token makes stale is
written again with the keys and values.

A decoder adds to the residual stream in place, so it can be cut between any two layers: the parts run one after the
other on the same stream, and it is read between them. A decoder without a drafter is not touched by any of this.

In a pipeline each stage reads the streams of its own layers, and passes them on with those of the stages before
(`parallel.decoder`); the first one, where the drafter is, keeps them when they come back with the final hidden states.
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
    ops: Ops | None = None
    """None: the decoder's."""
    layers: tuple[int, ...] = ()
    """The residual stream in front of these layers, ascending; none: the final hidden states."""
    project: Linear | None = None
    """Applied to the chosen streams side by side; None: what is kept are the final hidden states, or `as_read`."""
    as_read: bool = False
    """Whether the chosen streams themselves are kept."""
    caches: int = 1
    """Above 1: it is kept of the tokens of so many shards, each with blocks of its own, which are numbered through."""

    def on(self, decoder: Decoder) -> TappedDecoder:
        """`decoder`, writing them for every token."""
        ends = sorted({*self.layers, len(decoder.layers)} - {0})
        parts = [replace(decoder, layers=decoder.layers[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
        own = {field.name: getattr(decoder, field.name) for field in fields(Decoder)}
        return TappedDecoder(**own, inner=decoder, tap=self, parts=tuple(parts))

    def of_stage(self, first: int, last: int, of: int) -> StageTap:
        """For the stage of a pipeline that has layers `first` to `last` of `of`."""
        inside = tuple(at - first for at in self.layers if first <= at < last or at == last == of)
        return StageTap(replace(self, layers=inside), sum(at < first for at in self.layers), len(self.layers))


@dataclass(frozen=True, slots=True)
class StageTap:
    """What one stage of a pipeline does for a drafter."""

    tap: Tap
    """With the places inside the stage, counted from its first layer; of no width where the drafter is elsewhere."""
    before: int
    """Streams that the stages before it have read."""
    every: int
    """Those that all stages read."""

    def on(self, decoder: Decoder) -> StageTappedDecoder:
        tapped = self.tap.on(decoder)
        own = {field.name: getattr(tapped, field.name) for field in fields(TappedDecoder)}
        return StageTappedDecoder(**own, stage=self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TappedDecoder(Decoder):
    """See `Tap`. The last layer of its cache is what it keeps for the drafter."""

    inner: Decoder
    tap: Tap
    parts: tuple[Decoder, ...]
    """The layers between two places that are read."""

    def run(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        hidden, taken = self.run_tapped(residual, batch, kv)
        self.keep(hidden, taken, batch.slots, kv)
        return hidden

    def keep(self, hidden: Tensor, taken: Tensor, slots: Tensor, kv: KVCache) -> None:
        """Write what the drafter needs of tokens: their final hidden states, or the streams that were read."""
        project = self.tap.project
        kept = taken if self.tap.as_read else hidden if project is None else project(taken)
        (self.tap.ops or self.ops).store_rows(kept, kv.layers[-1], slots)

    def run_tapped(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> tuple[Tensor, Tensor]:
        """Final hidden states, and the wanted streams side by side."""
        ops, wanted = self.tap.ops or self.ops, self.tap.layers
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
        return hidden, taken

    @property
    def launched_eagerly(self) -> bool:
        return self.inner.launched_eagerly

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.inner.embed(token_ids)

    @property
    def residual_width(self) -> int:
        return self.inner.residual_width

    @property
    def stream_width(self) -> int:
        return self.inner.stream_width

    def entered(self, sent: Tensor) -> Tensor:
        return self.inner.entered(sent)

    def passed_on(self, stream: Tensor) -> Tensor:
        return self.inner.passed_on(stream)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.inner.logits(hidden)

    def cache_shape(self, block_size: int, dtype: torch.dtype) -> CacheShape:
        shape = self.inner.cache_shape(block_size, dtype)
        return replace(
            shape, kinds=(*shape.kinds, PagedRows(self.tap.width, block_size * self.tap.caches, self.embedding.dtype))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTappedDecoder(TappedDecoder):
    """One stage's layers; see `StageTap`. What it keeps for the drafter is kept when a step has gone through all."""

    stage: StageTap

    def run(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        return self.run_tapped(residual, batch, kv)[0]

    def cache_shape(self, block_size: int, dtype: torch.dtype) -> CacheShape:
        keeps = self.tap.width > 0
        return (
            TappedDecoder.cache_shape(self, block_size, dtype) if keeps else self.inner.cache_shape(block_size, dtype)
        )
