"""Operations over cached latents on one CUDA device: attention to all of them, and to those that an indexer chooses.

What is chosen is a list of slots per token, made and read on the device. A step with long contexts is the same launches
whatever its sequences are: of decodes each attends to its list or to everything, of prompts two launches share the
tokens. Beside that every launch follows from host values alone, as all of `TritonOps`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from penstock.engine.backends.cuda.kernels import (
    head_scales,
    index_choice,
    index_rows,
    index_scores,
    latent_decode,
    latent_prefill,
    latent_query,
    latent_values,
)
from penstock.engine.backends.cuda.kernels.common import ceil_div
from penstock.engine.backends.cuda.kernels.latent_tile import ChosenSlots
from penstock.engine.backends.interface import (
    AttentionBatch,
    Chosen,
    HeadScales,
    IndexLayout,
    IndexNorm,
    LatentAdditions,
    LatentLayout,
    LatentWeights,
)
from penstock.engine.backends.reference.indexer import PlainIndexing
from penstock.engine.backends.reference.latent import absorbed_attention

INVARIANT_ROWS = 256
"""Tokens of one launch in deterministic mode; bounds the memory of partial sums."""
_INVARIANT_BYTES = 128 << 20
"""Those partial sums where heads are wide (latents)."""
SCORE_BYTES = 32 << 20
"""Scores that exist at a time, at most: they are read several times, and these stay in the L2 cache."""
CHOICE_BYTES = 8 * SCORE_BYTES
"""What choosing takes at most, launched and captured: scores, rotated queries of as many tokens, counts and lists."""
_ALIGNED = 16
"""Tokens are scored in multiples of this: pointers to some of them stay multiples of what kernels are built for."""


class LatentOps(PlainIndexing):
    """See `Ops`."""

    batch_invariant: bool
    pdl: bool
    processors: int

    def latent_attention(
        self,
        q: Tensor,
        kv: Tensor | None,
        layout: LatentLayout,
        weights: LatentWeights,
        cos_sin: Tensor,
        batch: AttentionBatch,
        cache: Tensor,
        scales: Tensor | None = None,
        added: LatentAdditions | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if sinks is not None:  # which the kernels do not take
            alone = self.batch_invariant and batch.num_decodes == q.shape[0]
            return absorbed_attention(q, kv, layout, weights, cos_sin, batch, cache, scales, added, sinks, alone)
        return self._attend_latents(q, kv, layout, weights, cos_sin, batch, cache, scales, added, None)

    def scale_heads(self, queries: Tensor, positions: Tensor, scales: HeadScales) -> Tensor:
        return head_scales.scale(queries, positions, scales, pdl=self.pdl)

    def store_index_keys(
        self, keys: Tensor, norm: IndexNorm, layout: IndexLayout, cos_sin: Tensor, batch: AttentionBatch, cache: Tensor
    ) -> None:
        if layout.rotates_last:
            PlainIndexing.store_index_keys(self, keys, norm, layout, cos_sin, batch, cache)
        else:
            index_rows.store_keys(keys, norm, layout, cos_sin, batch, cache, pdl=self.pdl)

    def choose_tokens(
        self,
        queries: Tensor,
        weights: Tensor,
        layout: IndexLayout,
        cos_sin: Tensor,
        batch: AttentionBatch,
        cache: Tensor,
        block_size: int,
        *,
        every: bool = False,
    ) -> Chosen:
        """`every` changes nothing: additions apply to sequences that see everything as well; see `attend_chosen`."""
        if layout.rotates_last:
            return PlainIndexing.choose_tokens(
                self, queries, weights, layout, cos_sin, batch, cache, block_size, every=every
            )
        tokens, decodes, device = queries.shape[0], batch.num_decodes, queries.device
        longest = batch.max_context if batch.longest is None else batch.longest
        if longest <= layout.most:
            return None
        slots = torch.empty((tokens, layout.most), dtype=torch.int32, device=device)
        seen = torch.empty(tokens, dtype=torch.int32, device=device)
        width = ceil_div(longest, index_choice.TILE) * index_choice.TILE
        step = max(_ALIGNED, SCORE_BYTES // (4 * width) // _ALIGNED * _ALIGNED)
        for first in range(0, tokens, step):
            part = slice(first, min(tokens, first + step))
            turned, rows, counts = index_rows.ask(
                queries[part], layout, cos_sin, batch, first, seen[part], pdl=self.pdl
            )
            scores = torch.empty((len(turned), width), dtype=torch.float32, device=device)
            asked = weights[part], seen[part], rows, layout, batch, cache, block_size, scores
            # Of decodes, and behind them of prompts.
            border = min(max(0, decodes - first), len(turned))
            if border:
                index_scores.score_tokens(turned[:border], *asked, self.processors, pdl=self.pdl)
            if border < len(turned):
                tile = index_scores.choose_tile(turned.element_size())
                index_scores.score_tiles(turned, *asked, border, tile, pdl=self.pdl)
            index_choice.choose_best(
                scores, seen[part], rows, counts, batch, block_size, slots[part], self.processors, pdl=self.pdl
            )
        return ChosenSlots(slots, seen)

    def attend_chosen(
        self,
        q: Tensor,
        kv: Tensor | None,
        layout: LatentLayout,
        weights: LatentWeights,
        cos_sin: Tensor,
        batch: AttentionBatch,
        cache: Tensor,
        scales: Tensor | None,
        added: LatentAdditions | None,
        chosen: Chosen,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if sinks is not None or isinstance(chosen, tuple):  # chosen in PyTorch
            return PlainIndexing.attend_chosen(
                self, q, kv, layout, weights, cos_sin, batch, cache, scales, added, chosen, sinks
            )
        return self._attend_latents(q, kv, layout, weights, cos_sin, batch, cache, scales, added, chosen)

    def _attend_latents(
        self,
        q: Tensor,
        kv: Tensor | None,
        layout: LatentLayout,
        weights: LatentWeights,
        cos_sin: Tensor,
        batch: AttentionBatch,
        cache: Tensor,
        scales: Tensor | None,
        added: LatentAdditions | None,
        chosen: ChosenSlots | None,
    ) -> Tensor:
        tokens, decodes = q.shape[0], batch.num_decodes
        out = torch.empty((tokens, layout.heads * layout.value), dtype=q.dtype, device=q.device)
        if not tokens:
            return out
        fixed = self.batch_invariant and decodes == tokens  # steps always are; warm-up measures prompts too
        if added is not None:
            added.scale(q.view(tokens, layout.heads, -1)[..., : layout.plain])
        query = latent_query.prepare(q, kv, layout, weights, cos_sin, batch, cache, scales, fixed=fixed, pdl=self.pdl)
        if added is not None:
            added.queries(q.view(tokens, layout.heads, -1)[..., : layout.plain], query[..., : layout.latent])
        if fixed:
            self._attend_latents_invariant(query, layout, weights, batch, cache, scales, out, added, chosen)
            return out
        shape = latent_decode.choose(max(1, decodes), layout, q.element_size(), self.processors)
        if decodes == tokens <= latent_decode.FEW and added is None:
            latent_decode.decode(
                query, layout, weights, batch, cache, scales, shape, values=out, chosen=chosen, pdl=self.pdl
            )
            return out
        seen = torch.empty((tokens, layout.heads, layout.latent), dtype=q.dtype, device=q.device)
        if decodes:
            latent_decode.decode(
                query, layout, weights, batch, cache, scales, shape, seen=seen, chosen=chosen, pdl=self.pdl
            )
        if batch.context_lens.shape[0] > decodes:
            tile = latent_prefill.choose(layout, q.element_size())
            most = 0 if chosen is None else chosen.most
            latent_prefill.prefill(query, layout, batch, cache, scales, seen, tile, most=most, pdl=self.pdl)
            if chosen is not None:
                tile = latent_decode.one_share(layout, q.element_size())
                latent_decode.attend_lists(query, layout, chosen, cache, scales, seen, decodes, tile, pdl=self.pdl)
        if added is not None:
            added.turn(seen)
        latent_values.values_of(seen, layout, weights, out, pdl=self.pdl)
        if added is not None:
            added.values(seen, out.view(tokens, layout.heads, -1))
        return out

    def _attend_latents_invariant(
        self,
        query: Tensor,
        layout: LatentLayout,
        weights: LatentWeights,
        batch: AttentionBatch,
        cache: Tensor,
        scales: Tensor | None,
        out: Tensor,
        added: LatentAdditions | None,
        chosen: ChosenSlots | None,
    ) -> None:
        """As `TritonOps._attend_invariant`, over latents."""
        every = torch.empty_like(query[..., : layout.latent]) if added is not None else None
        shape = latent_decode.fixed(layout, query.element_size())
        step = min(INVARIANT_ROWS, max(1, _INVARIANT_BYTES // (4 * layout.heads * layout.latent * shape.splits)))
        for begin in range(0, query.shape[0], step):
            part = slice(begin, begin + step)
            count = min(step, query.shape[0] - begin)
            few = dataclasses.replace(
                batch, rows=batch.rows[part], context_lens=batch.context_lens[part], num_decodes=count
            )
            seen = torch.empty((count, layout.heads, layout.latent), dtype=query.dtype, device=query.device)
            some = None if chosen is None else chosen.part(part)
            latent_decode.decode(
                query[part], layout, weights, few, cache, scales, shape, seen=seen, chosen=some, pdl=self.pdl
            )
            if every is not None:
                every[part] = seen
            else:
                latent_values.values_of(seen, layout, weights, out[part], fixed=True, pdl=self.pdl)
        if added is not None and every is not None:
            added.turn(every)
            for begin in range(0, len(every), step):
                part = slice(begin, begin + step)
                latent_values.values_of(every[part], layout, weights, out[part], fixed=True, pdl=self.pdl)
            added.values(every, out.view(len(out), layout.heads, -1))
