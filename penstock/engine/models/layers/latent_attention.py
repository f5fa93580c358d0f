"""Softmax attention over latents (MLA): one vector per token from which every head's key and value follow.

Queries, the latent and the key that is rotated come from one product with the layer's input, queries perhaps through
a narrower vector that is normalized. Everything between that and the output projection is one operation of the
backend (`Ops.latent_attention`), which chooses whether to make keys and values or to meet the latents as they are.

Where tokens attend to few others only (`indexer`), steps whose contexts are no longer than that are computed as if they
attended to all, which is the same.

A layer may attend to the latents of a layer below it (`source`), with keys and values that it makes of them itself. It
stores none then, but for the keys of an indexer of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.interface import (
    ActivationOps,
    AttentionBatch,
    Chosen,
    HeadScales,
    LatentAdditions,
    LatentLayout,
    LatentWeights,
    Ops,
)
from penstock.engine.kv.kinds import BothKinds, CacheKind, OfLayer, PagedLatent, PagedLatentCache
from penstock.engine.models.layers.indexer import Indexer
from penstock.engine.models.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """See `TokenMixer`."""

    ops: ActivationOps
    attention_ops: Ops
    inputs: Linear
    """Queries, or the narrower vector that they are made of, then latent and rotated key; with a `source` queries
    alone."""
    output: Linear
    heads: LatentLayout
    weights: LatentWeights
    cos_sin: Tensor
    """Rotary table [positions, rotated dimensions], shared with other layers."""
    query_norm: Tensor | None = None
    query_up: Linear | None = None
    """Where queries go through a narrower vector: its norm, and what makes queries of it."""
    cache_scale: Tensor | None = None
    """With an FP8 cache: what is stored is divided by this, float32 [1]."""
    additions: LatentAdditions | None = None
    """Adapters of what makes keys and values of latents."""
    most: int | None = None
    """The longest context of which a token sees all, itself included; of longer ones it sees what an indexer chooses.
    None: there is none."""
    query_scales: Tensor | None = None
    """float32 [positions]: what queries are multiplied by."""
    head_scales: HeadScales | None = None
    """What those of each head are multiplied by instead."""
    source: int | None = None
    """The layer whose latents it attends to; None: its own."""
    indexer: Indexer | None = None
    """What chooses them; None: they are those that the last layer with an indexer chose."""
    gated_queries: bool = False
    """Whether `query_up` reads the narrower vector with its norm and without, and gives for each head a query and a
    gate of its output."""
    output_gate: Linear | None = None
    """Of a gate that is made of what `inputs` reads."""
    sinks: Tensor | None = None
    """float32 [heads]; see `Attention`."""

    @property
    def follows(self) -> bool:
        """Whether the tokens it attends to are those that another layer chose."""
        return self.most is not None and self.indexer is None

    @property
    def linears(self) -> tuple[Linear, ...]:
        own = (self.inputs, self.output) if self.query_up is None else (self.inputs, self.query_up, self.output)
        own = own if self.output_gate is None else (*own, self.output_gate)
        return own if self.indexer is None else (*own, *self.indexer.linears)

    @property
    def weight_bytes(self) -> int:
        up = self.weights.up
        chosen_by = 0 if self.indexer is None else self.indexer.weight_bytes
        return sum(linear.weight_bytes for linear in self.linears) + up.numel() * up.element_size() + chosen_by

    def cache_kind(self, block_size: int, dtype: torch.dtype) -> CacheKind:
        latents: CacheKind = PagedLatent(self.heads.cached, block_size, dtype)
        if self.source is not None:
            latents = OfLayer(self.source)
        if self.indexer is None:
            return latents
        return BothKinds(latents, self.indexer.cache_kind(block_size, self.weights.norm.dtype))

    def forward(self, x: Any, batch: AttentionBatch, cache: Any) -> Tensor:
        """`cache`: a `PagedLatentCache`; with an indexer, a pair of that and of what the indexer keeps."""
        q, kv = self._parts(self.inputs(x))
        narrow, gate = q, None if self.output_gate is None else self.output_gate(x)
        if self.query_up is not None and self.query_norm is not None:
            narrow = self.ops.rms_norm(q, self.query_norm, self.weights.eps)
            if self.gated_queries:
                q, gate = self._split(self.query_up(torch.cat((narrow, q), -1)))
            else:
                q = self.query_up(narrow)
        seen = self._seen(x, narrow, self._grown(q, batch), kv, batch, cache)
        return self.output(seen if gate is None else self.attention_ops.sigmoid_mul(seen, gate))

    def _parts(self, made: Tensor) -> tuple[Tensor, Tensor | None]:
        """What `inputs` gives: of queries, and of what is kept."""
        if self.source is not None:
            return made, None
        split = made.shape[1] - self.heads.cached
        return made[:, :split], made[:, split:]

    def _split(self, made: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and gates."""
        heads = made.view(len(made), self.heads.heads, -1)
        queries, gates = heads[..., : self.heads.query], heads[..., self.heads.query :]
        return queries.reshape(len(made), -1), gates.reshape(len(made), -1)

    def _seen(self, x: Any, narrow: Tensor, q: Tensor, kv: Tensor | None, batch: AttentionBatch, cache: Any) -> Tensor:
        """[T, heads * value]."""
        if self.most is None:
            return self._attend(q, kv, batch, cache)
        latents = cache if self.indexer is None else cache[0]
        chosen = self._choose(x, narrow, batch, latents, None if self.indexer is None else cache[1])
        if not chosen:
            return self._attend(q, kv, batch, latents)
        scales = self.cache_scale if latents.scales is None else latents.scales
        return self.attention_ops.attend_chosen(
            q, kv, self.heads, self.weights, self.cos_sin, batch, latents.latents, scales, self.additions, chosen,
            self.sinks,
        )  # fmt: skip

    def _choose(self, x: Tensor, narrow: Tensor, batch: AttentionBatch, latents: PagedLatentCache, keys: Any) -> Chosen:
        """Nothing where all sequences see everything."""
        assert self.most is not None
        if self.indexer is not None and keys is not None:
            self.indexer.store(x, batch, keys)
        # With adapters all tokens of a step take the same way: they must not depend on others in deterministic mode.
        always = self.additions is not None and self.attention_ops.batch_invariant
        longest = int(batch.context_lens.max()) if batch.longest is None else batch.longest
        if longest <= self.most and not always:
            return ()
        if self.indexer is None or keys is None:
            found: Chosen | None = batch.chosen
            assert found is not None, "the first layer of a stage has an indexer"
            return found
        size, every = latents.latents.shape[1], self.additions is not None
        batch.chosen = self.indexer.choose(x, narrow, batch, keys, size, every=every) or ()
        return batch.chosen

    def fused(
        self, residual: Tensor, norm: Tensor, eps: float, batch: AttentionBatch, cache: PagedLatentCache
    ) -> Tensor:
        """See `FusedMixer`; for linears that are `FusedLinear`."""
        inputs: Any = self.inputs
        query_up: Any = self.query_up
        output: Any = self.output
        q, kv = self._parts(inputs.fused(residual, norm=norm, eps=eps))
        if query_up is not None:
            q = query_up.fused(q, norm=self.query_norm, eps=self.weights.eps)
        q = self._grown(q, batch)
        out: Tensor = output.fused(self._attend(q, kv, batch, cache), residual=residual)
        return out

    def _grown(self, q: Tensor, batch: AttentionBatch) -> Tensor:
        if self.head_scales is not None:
            return self.attention_ops.scale_heads(q, batch.positions, self.head_scales)
        if self.query_scales is None:
            return q
        return (q * self.query_scales[batch.positions].unsqueeze(-1)).to(q.dtype)

    def _attend(self, q: Tensor, kv: Tensor | None, batch: AttentionBatch, cache: PagedLatentCache) -> Tensor:
        scales = self.cache_scale if cache.scales is None else cache.scales
        return self.attention_ops.latent_attention(
            q, kv, self.heads, self.weights, self.cos_sin, batch, cache.latents, scales, self.additions, self.sinks
        )
