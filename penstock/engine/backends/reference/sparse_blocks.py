"""Choosing blocks by the keys of their tokens and attending to them, in plain PyTorch: what every backend runs. See
`SparseBlockOps`.

Tokens that see everything go through the backend's own attention. The others are compared with all index keys of their
context, and keys and values of what they chose are gathered from the cache, some tokens at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import (
    AttentionBatch,
    HeadLayout,
    KVScales,
    SparseBlockIndex,
    SparseBlockLayout,
)
from penstock.engine.backends.reference.gathered import Caches, leading, normed, slots_of, turned
from penstock.engine.backends.reference.indexer import best_of

_BYTES = 64 << 20
"""Scores, or gathered keys and values, that are made at a time, at most."""


class PlainSparseBlocks(ABC):
    """See `SparseBlockOps`."""

    batch_invariant: bool

    @abstractmethod
    def attention(
        self,
        q: Tensor,
        layout: HeadLayout,
        batch: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_scales: KVScales | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...

    def store_token_keys(
        self,
        keys: Tensor,
        norm: Tensor,
        layout: SparseBlockLayout,
        cos_sin: Tensor,
        batch: AttentionBatch,
        cache: Tensor,
    ) -> None:
        cache[batch.slots] = turned(normed(keys, norm, layout.eps), cos_sin[batch.positions]).to(cache.dtype)

    def attend_sparse_blocks(
        self,
        q: Tensor,
        heads: HeadLayout,
        index: SparseBlockIndex,
        cos_sin: Tensor,
        batch: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_scales: KVScales | None = None,
    ) -> Tensor:
        layout = index.layout
        starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
        sizes = [end - begin for begin, end in pairwise(starts)]
        # Tokens of each sequence that see everything: the first ones.
        most = layout.everything
        whole = [min(size, max(0, most - (seen - size))) for size, seen in zip(sizes, contexts, strict=True)]
        if whole == sizes:
            return self.attention(q, heads, batch, k_cache, v_cache, kv_scales)
        out = q.new_empty(q.shape[0], heads.heads * heads.head_dim)
        if any(whole):
            at, part = leading(batch, whole)
            out[at] = self.attention(q[at].contiguous(), heads, part, k_cache, v_cache, kv_scales)
        groups = _groups(layout, heads, k_cache, v_cache, kv_scales, q.dtype)
        queries = turned(
            normed(index.queries.view(len(q), layout.heads, -1), index.query_norm, layout.eps),
            cos_sin[batch.positions].unsqueeze(1),
        ).float()
        for i, (some, context) in enumerate(zip(whole, contexts, strict=True)):
            begin, end = starts[i] + some, starts[i + 1]
            if begin == end:
                continue
            table = batch.block_tables[batch.rows[i]]
            every = torch.arange(context, device=q.device)
            keys = index.keys[slots_of(table, every, k_cache.shape[2])].float()
            step = _at_once(layout, heads, context, alone=self.batch_invariant)
            for first in range(begin, end, step):
                new = slice(first, min(end, first + step))
                positions = batch.positions[new]
                seen = keys[: context - starts[i + 1] + new.stop]  # of the last of them
                blocks = _chosen(queries[new], seen, layout, positions)
                parts = []
                for head, (own, caches) in enumerate(groups):
                    at, there = _members(blocks[:, head], layout, positions)
                    of_group = q[new, head * own.heads : (head + 1) * own.heads]
                    parts.append(caches.attend(of_group, own, slots_of(table, at, k_cache.shape[2]), there))
                out[new] = torch.cat(parts, 1)
        return out


def _groups(
    layout: SparseBlockLayout, heads: HeadLayout, k: Tensor, v: Tensor, scales: KVScales | None, dtype: torch.dtype
) -> list[tuple[HeadLayout, Caches]]:
    """Of every head of the indexer: the heads that it chooses for, and their part of the cache."""
    size = heads.kv_heads // layout.heads
    own = replace(heads, heads=heads.heads // layout.heads, kv_heads=size)
    found = []
    for head in range(layout.heads):
        part = slice(head * size, (head + 1) * size)
        # Scales are of every token, [blocks, kv_heads, block_size], or of the layer, [kv_heads].
        few = None if scales is None else (_part(scales[0], part), _part(scales[1], part))
        found.append((own, Caches(k[:, part], v[:, part], few, dtype)))
    return found


def _part(scales: Tensor, kv_heads: slice) -> Tensor:
    return scales[:, kv_heads] if scales.dim() == 3 else scales[kv_heads]


def _at_once(layout: SparseBlockLayout, heads: HeadLayout, context: int, *, alone: bool) -> int:
    if alone:
        return 1
    seen = layout.everything * heads.kv_heads * heads.head_dim * 2
    return max(1, _BYTES // (4 * (context * layout.heads + seen)))


def _chosen(queries: Tensor, keys: Tensor, layout: SparseBlockLayout, positions: Tensor) -> Tensor:
    """Blocks [P, heads, most] that each of `queries` [P, heads, dim] sees, of which there are at least so many."""
    count, rate = len(keys), layout.rate
    scores = torch.matmul(queries, keys.t())
    later = torch.arange(count, device=keys.device) > positions.view(-1, 1, 1)
    scores = F.pad(scores.masked_fill(later, float("-inf")), (0, -count % rate), value=float("-inf"))
    best = scores.view(*scores.shape[:2], -1, rate).amax(-1)
    which, own = torch.arange(best.shape[2], device=keys.device), (positions // rate).view(-1, 1, 1)
    best = best.masked_fill((which <= own) & (which > own - layout.local), float("inf"))
    seen = (which <= own).expand_as(best)
    found, _ = best_of(best.flatten(0, 1), seen.flatten(0, 1), layout.most)
    return found.view(*best.shape[:2], -1)


def _members(blocks: Tensor, layout: SparseBlockLayout, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Positions [P, n] of the tokens in `blocks` [P, most], and whether the query sees them."""
    within = torch.arange(layout.rate, device=blocks.device)
    members, own = (blocks.unsqueeze(2) * layout.rate + within).flatten(1), positions.unsqueeze(1)
    return torch.minimum(members, own), members <= own
