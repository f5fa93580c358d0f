"""Choosing blocks of tokens and attending to them, in plain PyTorch: what every backend runs. See `BlockIndexOps`.

Tokens that see everything go through the backend's own attention. For the others keys and values of what they chose are
gathered from the cache, some tokens at a time, so that memory does not grow with the context.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import (
    FP8,
    AttentionBatch,
    BlockIndex,
    BlockIndexLayout,
    Entries,
    HeadLayout,
    KVScales,
)
from penstock.engine.backends.reference.indexer import best_of
from penstock.engine.backends.reference.latent import rotate
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
        pooled = tokens[_slots(tables, members, blocks.block_size)].float().mean(1).to(tokens.dtype)
        made = _turned(_normed(pooled, norm, layout.eps), cos_sin[first])
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
            at, part = _leading(batch, whole)
            out[at] = self.attention(q[at].contiguous(), heads, part, k_cache, v_cache, kv_scales)
        caches = _Caches(k_cache, v_cache, kv_scales, q.dtype)
        turned = _turned(
            _normed(index.queries.view(len(q), index.layout.heads, -1), index.query_norm, index.layout.eps),
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
                    turned[new], keys[:complete], index.layout, batch.positions[new], table, k_cache.shape[2]
                )
                out[new] = caches.attend(q[new], heads, slots, there)
        return out


class _Caches:
    """Keys and values of a layer, of which some tokens are read."""

    def __init__(self, k: Tensor, v: Tensor, scales: KVScales | None, dtype: torch.dtype) -> None:
        self.k, self.v, self.dtype = k, v, dtype
        self.scales = scales

    def attend(self, q: Tensor, heads: HeadLayout, slots: Tensor, there: Tensor) -> Tensor:
        """What queries [P, heads, head_dim] see of the tokens in `slots` [P, n]: [P, heads * head_dim]."""
        k_scales, v_scales = self.scales or (None, None)
        keys, values = self._gather(self.k, k_scales, slots), self._gather(self.v, v_scales, slots)
        # A place for which there is no token holds anything, and a weight of zero does not silence a NaN.
        gone = ~there[:, None, :, None]
        keys, values = keys.masked_fill(gone, 0), values.masked_fill(gone, 0)
        grouped = q.view(len(q), heads.kv_heads, -1, heads.head_dim)
        seen = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=there[:, None, None], scale=heads.scale)
        return seen.reshape(len(q), -1)

    def _gather(self, cache: Tensor, scales: Tensor | None, slots: Tensor) -> Tensor:
        """[P, kv_heads, n, head_dim]."""
        size = cache.shape[2]
        block, offset = slots // size, slots % size
        if cache.dtype == FP8:  # indexing knows bytes on every device, FP8 not
            found = cache.view(torch.uint8)[block, :, offset].view(FP8)
        else:
            found = cache[block, :, offset]
        if scales is not None:
            factors = scales[block, :, offset] if scales.dim() == 3 else scales.expand(*slots.shape, -1)
            found = found.float() * factors.float().unsqueeze(-1)
        return found.to(self.dtype).transpose(1, 2)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def _turned(x: Tensor, table: Tensor) -> Tensor:
    """The first dimensions, as many as the table has, rotated."""
    rotary = table.shape[-1]
    turned = rotate(x[..., :rotary], table[..., : rotary // 2], table[..., rotary // 2 :], False)
    return torch.cat((turned, x[..., rotary:]), -1)


def _rows(batch: AttentionBatch) -> Tensor:
    """The row in the block tables of every token."""
    sizes = batch.query_starts.diff().long()
    return batch.rows.long().repeat_interleave(sizes, output_size=len(batch.positions))


def _slots(tables: Tensor, positions: Tensor, size: int) -> Tensor:
    """Of tokens at `positions` [N, n] of sequences whose tables are `tables` [N, blocks], or of one sequence."""
    blocks = tables[positions // size] if tables.dim() == 1 else tables.gather(1, positions // size)
    return blocks.long() * size + positions % size


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
    return _slots(table, at, size), there


def _leading(batch: AttentionBatch, counts: list[int]) -> tuple[Tensor, AttentionBatch]:
    """The first so many new tokens of each sequence: which tokens those are, and a step of these alone."""
    starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
    kept = [i for i, count in enumerate(counts) if count]
    device = batch.positions.device
    at = torch.tensor([t for i in kept for t in range(starts[i], starts[i] + counts[i])], device=device)
    ends = torch.tensor([0, *(counts[i] for i in kept)], dtype=torch.int32, device=device)
    lens = [contexts[i] - (starts[i + 1] - starts[i]) + counts[i] for i in kept]
    decodes = sum(i < batch.num_decodes for i in kept)
    return at, replace(
        batch,
        positions=batch.positions[at],
        slots=batch.slots[at],
        query_starts=ends.cumsum(0, dtype=torch.int32),
        context_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        rows=batch.rows[torch.tensor(kept, device=device)],
        num_decodes=decodes,
        max_query=max(counts),
        total_context=sum(lens[decodes:]),
        longest=max(lens),
        attended=None,
        states=None,
        waves=None,
        host=None,
    )
