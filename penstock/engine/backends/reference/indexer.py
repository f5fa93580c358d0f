"""Choosing tokens and attending to them, in plain PyTorch: what every backend runs.

Scores are computed sequence by sequence, some queries at a time, so that memory does not grow with the context. What is
chosen is gathered from the cache and attended to with absorbed queries (see `latent`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import (
    AttentionBatch,
    Chosen,
    ChosenTokens,
    IndexLayout,
    IndexNorm,
    LatentAdditions,
    LatentLayout,
    LatentWeights,
)
from penstock.engine.backends.reference.latent import absorb, attend, gather, keep, prepare, rotate, values_of

_BYTES = 64 << 20
"""Scores, or gathered latents, that are made at a time, at most."""


class PlainIndexing(ABC):
    """See `IndexOps`."""

    @abstractmethod
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
    ) -> Tensor: ...

    def store_index_keys(
        self, keys: Tensor, norm: IndexNorm, layout: IndexLayout, cos_sin: Tensor, batch: AttentionBatch, cache: Tensor
    ) -> None:
        normed = F.layer_norm(keys, (layout.dim,), norm.weight, norm.bias, norm.eps)
        cache[batch.slots] = _rotated(normed, layout, cos_sin[batch.positions])

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
        turned = _rotated(
            queries.view(-1, layout.heads, layout.dim), layout, cos_sin[batch.positions].unsqueeze(1)
        ).float()
        weights = weights * layout.heads**-0.5
        starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
        found = []
        for i, context in enumerate(contexts):
            if not every and context <= layout.most:
                continue
            new = slice(starts[i], starts[i + 1])
            slots = _slots_of(batch.block_tables[batch.rows[i], : -(-context // block_size)], block_size)[:context]
            if context <= layout.most:
                valid = _visible(new.stop - new.start, 0, new.stop - new.start, slots)
                found.append(ChosenTokens(i, slots.expand(len(valid), -1), valid))
                continue
            at, valid = _best(turned[new], weights[new], cache[slots].float(), layout)
            found.append(ChosenTokens(i, slots[at], valid))
        return tuple(found)

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
        few = {one.sequence for one in chosen}
        others = [i for i in range(len(batch.context_lens)) if i not in few]
        if not others:
            return _attend(q, kv, layout, weights, cos_sin, batch, cache, scales, added, chosen, sinks)
        if not few:
            return self.latent_attention(q, kv, layout, weights, cos_sin, batch, cache, scales, added, sinks)
        assert added is None
        out = q.new_empty(q.shape[0], layout.heads * layout.value)
        keep(kv, layout, weights, cos_sin, batch, cache, scales)
        tokens, part = _part(batch, others)
        some = q[tokens], None if kv is None else kv[tokens]
        out[tokens] = self.latent_attention(*some, layout, weights, cos_sin, part, cache, scales, None, sinks)
        tokens, part = _part(batch, sorted(few))
        some = q[tokens], None if kv is None else kv[tokens]
        out[tokens] = _attend(*some, layout, weights, cos_sin, part, cache, scales, None, chosen, sinks)
        return out


def _rotated(x: Tensor, layout: IndexLayout, table: Tensor) -> Tensor:
    half, rest = layout.rotary // 2, layout.dim - layout.rotary
    if layout.rotates_last:
        turned = rotate(x[..., rest:], table[..., :half], table[..., half:], layout.interleaved)
        return torch.cat((x[..., :rest], turned), -1)
    turned = rotate(x[..., : layout.rotary], table[..., :half], table[..., half:], layout.interleaved)
    return torch.cat((turned, x[..., layout.rotary :]), -1)


def _slots_of(blocks: Tensor, block_size: int) -> Tensor:
    return (blocks.long().unsqueeze(1) * block_size + torch.arange(block_size, device=blocks.device)).flatten()


def _visible(new: int, begin: int, end: int, slots: Tensor) -> Tensor:
    """bool [end - begin, context]: what those of the last `new` tokens of a sequence see."""
    positions = torch.arange(len(slots), device=slots.device)
    return positions <= positions[len(slots) - new + begin : len(slots) - new + end].unsqueeze(1)


def _best(queries: Tensor, weights: Tensor, keys: Tensor, layout: IndexLayout) -> tuple[Tensor, Tensor]:
    """Positions [new, most] with the best scores of what the last tokens of a sequence see, and whether there are so
    many. `queries` [new, heads, dim], `keys` [context, dim]."""
    new, context = queries.shape[0], keys.shape[0]
    at = torch.empty((new, layout.most), dtype=torch.int64, device=keys.device)
    valid = torch.empty((new, layout.most), dtype=torch.bool, device=keys.device)
    turned, positions = keys.t(), torch.arange(context, device=keys.device)
    step = max(1, _BYTES // (4 * layout.heads * context))
    for begin in range(0, new, step):
        part = slice(begin, min(new, begin + step))
        scores = F.relu(torch.matmul(queries[part], turned) * layout.dim**-0.5)
        scores = torch.matmul(weights[part].unsqueeze(1), scores).squeeze(1)
        seen = _visible(new, part.start, part.stop, positions)
        at[part], valid[part] = best_of(scores, seen, layout.most)
    return at, valid


def best_of(scores: Tensor, seen: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Places [n, most] of the largest of `scores` [n, m] that are `seen`, in order, and whether there are so many. Of
    equal ones the earlier."""
    scores = scores.masked_fill(~seen, float("-inf"))
    least = scores.topk(most, dim=-1).values[:, -1:]
    above, equal = scores > least, (scores == least) & seen
    room = most - above.sum(-1, keepdim=True)
    taken = above | (equal & (equal.cumsum(-1) <= room))
    # One place more than there are, for all that are not taken.
    where = torch.where(taken, taken.cumsum(-1) - 1, most)
    places = torch.arange(scores.shape[1], device=scores.device)
    found = places.new_zeros(len(scores), most + 1)
    at = found.scatter_(1, where, places.expand_as(where))[:, :most]
    return at, places[:most] < taken.sum(-1, keepdim=True)


def _part(batch: AttentionBatch, sequences: Sequence[int]) -> tuple[Tensor, AttentionBatch]:
    """Some sequences of a step: which tokens they have, and a step of these alone."""
    starts, contexts, device = batch.query_starts.tolist(), batch.context_lens.tolist(), batch.positions.device
    lengths = [starts[i + 1] - starts[i] for i in sequences]
    tokens = torch.tensor([t for i in sequences for t in range(starts[i], starts[i + 1])], device=device)
    ends = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    which = torch.tensor(list(sequences), device=device)
    decodes = sum(i < batch.num_decodes for i in sequences)
    return tokens, replace(
        batch,
        positions=batch.positions[tokens],
        slots=batch.slots[tokens],
        query_starts=ends,
        context_lens=batch.context_lens[which],
        rows=batch.rows[which],
        num_decodes=decodes,
        max_query=max(lengths),
        total_context=sum(contexts[i] for i in sequences[decodes:]),
        attended=None,
        host=None,
    )


def _attend(
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
    sinks: Tensor | None,
) -> Tensor:
    """Of a step whose sequences are those of `chosen`. Each is computed alone."""
    plain, rotated = prepare(q, kv, layout, weights, cos_sin, batch, cache, scales)
    tokens, starts = q.shape[0], batch.query_starts.tolist()
    runs = [slice(begin, end) for begin, end in pairwise(starts)]
    if added is not None:
        added.scale(plain)
    absorbed = q.new_empty(tokens, layout.heads, layout.cached)
    for run in runs:
        absorbed[run] = absorb(plain[run], rotated[run], layout, weights)
    if added is not None:
        queries = absorbed[..., : layout.latent].contiguous()
        added.queries(plain, queries)
        absorbed = torch.cat((queries, rotated), -1)
    seen = q.new_empty(tokens, layout.heads, layout.latent)
    for run, one in zip(runs, chosen, strict=True):
        seen[run] = _over(absorbed[run], one, layout, cache, scales, sinks)
    if added is not None:
        added.turn(seen)
    out = q.new_empty(tokens, layout.heads, layout.value)
    for run in runs:
        out[run] = values_of(seen[run], layout, weights)
    if added is not None:
        added.values(seen, out)
    return out.view(tokens, -1)


def _over(
    q: Tensor,
    chosen: ChosenTokens,
    layout: LatentLayout,
    cache: Tensor,
    scales: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """What absorbed queries see of chosen tokens: [new, heads, latent]."""
    slots, valid = chosen.slots, chosen.valid
    rows = cache.view(-1, 1, cache.shape[-1])
    row_scales = scales.view(-1, 1) if scales is not None and scales.dim() == 2 else scales
    seen = q.new_empty(q.shape[0], layout.heads, layout.latent)
    step = max(1, _BYTES // (4 * slots.shape[1] * layout.cached))
    for begin in range(0, q.shape[0], step):
        part = slice(begin, begin + step)
        latents = gather(rows, row_scales, slots[part], q.dtype)
        # A place for which there is no token holds anything, and a weight of zero does not silence a NaN.
        latents = latents.masked_fill(~valid[part].unsqueeze(-1), 0)
        values, visible = latents[..., : layout.latent], valid[part].unsqueeze(1)
        seen[part] = attend(q[part], latents, values, visible, layout.scale, sinks)
    return seen
