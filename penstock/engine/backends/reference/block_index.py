"""Choosing blocks of tokens and attending to them, in plain PyTorch: what every backend runs. See `BlockIndexOps`.

Tokens that see everything go through the backend's own attention. For the others keys and values of what they chose are
gathered from the cache, some tokens at a time, so that memory does not grow with the context.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import (
    AttentionBatch,
    BlockIndex,
    BlockIndexLayout,
    Entries,
    HeadLayout,
    KVScales,
)
from penstock.engine.backends.reference.gathered import Caches, leading, normed, slots_of, turned
from penstock.engine.backends.reference.indexer import best_of
from penstock.engine.backends.reference.pooling import entry_slots

_BYTES = 64 << 20
"""Scores, or gathered keys and values, that are made at a time, at most."""


class PlainBlockIndexing(ABC):
    """See `BlockIndexOps`."""

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

    def store_block_keys(
        self,
        keys: Tensor,
        norm: Tensor,
        layout: BlockIndexLayout,
        cos_sin: Tensor,
        batch: AttentionBatch,
        tokens: Tensor,
        blocks: Entries,
    ) -> None:
        tokens[batch.slots] = keys.to(tokens.dtype)
        done = torch.nonzero((batch.positions + 1) % layout.rate == 0).squeeze(1)
        if not len(done):
            return
        tables = batch.block_tables[_rows(batch)[done]]
        which = batch.positions[done] // layout.rate
        first = which * layout.rate
        members = first.unsqueeze(1) + torch.arange(layout.rate, device=keys.device)
        pooled = tokens[slots_of(tables, members, blocks.block_size)].float().mean(1).to(tokens.dtype)
        made = turned(normed(pooled, norm, layout.eps), cos_sin[first])
        slots = entry_slots(tables, which.unsqueeze(1), layout.rate, blocks).squeeze(1)
        blocks.rows.view(-1, layout.dim)[slots] = made.to(blocks.rows.dtype)

    def attend_blocks(
        self,
        q: Tensor,
        heads: HeadLayout,
        index: BlockIndex,
        cos_sin: Tensor,
        batch: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_scales: KVScales | None = None,
    ) -> Tensor:
        most = index.layout.everything
        starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
        sizes = [end - begin for begin, end in pairwise(starts)]
        # Tokens of each sequence that see everything: the first ones.
        whole = [min(size, max(0, most - (seen - size))) for size, seen in zip(sizes, contexts, strict=True)]
        if whole == sizes:
            return self.attention(q, heads, batch, k_cache, v_cache, kv_scales)
        out = q.new_empty(q.shape[0], heads.heads * heads.head_dim)
        if any(whole):
            at, part = leading(batch, whole)
            out[at] = self.attention(q[at].contiguous(), heads, part, k_cache, v_cache, kv_scales)
        caches = Caches(k_cache, v_cache, kv_scales, q.dtype)
        queries = turned(
            normed(index.queries.view(len(q), index.layout.heads, -1), index.query_norm, index.layout.eps),
            cos_sin[batch.positions].unsqueeze(1),
        ).float()
        for i, (some, context) in enumerate(zip(whole, contexts, strict=True)):
            begin, end = starts[i] + some, starts[i + 1]
            table = batch.block_tables[batch.rows[i]]
            if begin == end:
                continue
            keys = _block_keys(index, table, context)
            step = _at_once(index.layout, heads, len(keys), alone=self.batch_invariant)
            for first in range(begin, end, step):
                new = slice(first, min(end, first + step))
                complete = (context - starts[i + 1] + new.stop) // index.layout.rate  # for the last of them
                slots, there = _chosen(
                    queries[new], keys[:complete], index.layout, batch.positions[new], table, k_cache.shape[2]
                )
                out[new] = caches.attend(q[new], heads, slots, there)
        return out


def _rows(batch: AttentionBatch) -> Tensor:
    """The row in the block tables of every token."""
    sizes = batch.query_starts.diff().long()
    return batch.rows.long().repeat_interleave(sizes, output_size=len(batch.positions))


def _block_keys(index: BlockIndex, table: Tensor, context: int) -> Tensor:
    """float32 [n, dim] of all complete blocks of a sequence."""
    layout = index.layout
    which = torch.arange(context // layout.rate, device=table.device)
    slots = entry_slots(table, which, layout.rate, index.keys)
    return index.keys.rows.view(-1, layout.dim)[slots].float()


def _at_once(layout: BlockIndexLayout, heads: HeadLayout, blocks: int, *, alone: bool) -> int:
    if alone:
        return 1
    seen = (layout.most + 1) * layout.rate * heads.kv_heads * heads.head_dim * 2
    return max(1, _BYTES // (4 * (blocks * layout.heads + seen)))


def _chosen(
    queries: Tensor, keys: Tensor, layout: BlockIndexLayout, positions: Tensor, table: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Cache slots [P, n] of the tokens that each query sees, and whether there is one."""
    device = queries.device
    complete = (positions + 1) // layout.rate
    scores = F.relu(torch.matmul(queries, keys.t())).sum(1) / layout.dim**0.5
    seen = torch.arange(len(keys), device=device) < complete.unsqueeze(1)
    blocks, _ = best_of(scores, seen, layout.most)
    within = torch.arange(layout.rate, device=device)
    members = (blocks.unsqueeze(2) * layout.rate + within).flatten(1)
    behind = (complete * layout.rate).unsqueeze(1) + within[:-1]
    there = torch.cat((torch.ones_like(members, dtype=torch.bool), behind <= positions.unsqueeze(1)), 1)
    at = torch.minimum(torch.cat((members, behind), 1), positions.unsqueeze(1))
    return slots_of(table, at, size), there
