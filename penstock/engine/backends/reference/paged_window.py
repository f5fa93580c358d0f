"""Attention to a window of keys that lie in blocks, in plain PyTorch: what every backend runs. See `CompressionOps`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import AttentionBatch, CompressionLayout
from penstock.engine.backends.reference.pooling import rotate_last

_BYTES = 64 << 20
"""Of the keys that are gathered at a time, at most."""

Seen = tuple[Tensor, Tensor]
"""Keys [n, dim], or [P, n, dim] where each query has its own, and which of them a query sees: bool [P, n]."""


class PlainPagedWindow:
    """See `CompressionOps`."""

    batch_invariant: bool

    def paged_window_attention(
        self,
        q: Tensor,
        keys: Tensor,
        layout: CompressionLayout,
        sinks: Tensor,
        cos_sin: Tensor,
        batch: AttentionBatch,
        rows: Tensor,
    ) -> Tensor:
        table = cos_sin[batch.positions]
        queries = queries_of(q, layout, table)
        size, dim = rows.shape[1:]
        rows.view(-1, dim)[batch.slots] = rotate_last(keys, table).to(rows.dtype)
        before = torch.arange(1 - layout.window, 1, device=q.device)
        seen = batch.positions.unsqueeze(1) + before
        there = seen >= 0
        seen = seen.clamp(min=0)
        tables = batch.block_tables[batch.rows[batch.owners].long()]
        slots = tables.gather(1, seen // size).long() * size + seen % size
        # In deterministic mode every token by itself.
        step = 1 if self.batch_invariant else max(1, _BYTES // (4 * layout.window * dim))
        out = torch.empty_like(queries)
        for begin in range(0, len(q), step):
            some = slice(begin, begin + step)
            # A place before the first token holds anything, and a weight of zero does not silence a NaN.
            near = rows.view(-1, dim)[slots[some]].masked_fill(~there[some].unsqueeze(-1), 0)
            out[some] = attend(queries[some], [(near, there[some])], sinks, layout.scale)
        return rotate_last(out, table.unsqueeze(1), back=True).to(q.dtype).flatten(1)


def queries_of(q: Tensor, layout: CompressionLayout, table: Tensor) -> Tensor:
    """float32 [T, heads, head_dim]: normalized and rotated. `table`: of each token's position."""
    heads = q.view(-1, layout.heads, layout.head_dim)
    return rotate_last(F.rms_norm(heads.float(), (layout.head_dim,), eps=layout.eps), table.unsqueeze(1))


def attend(q: Tensor, seen: list[Seen], sinks: Tensor, scale: float) -> Tensor:
    """[P, heads, head_dim] in float32."""
    scores = [
        (torch.matmul(q, keys.float().transpose(-1, -2)) * scale).masked_fill(~there.unsqueeze(1), float("-inf"))
        for keys, there in seen
    ]
    last = sinks.view(1, -1, 1).expand(len(q), -1, 1)
    weights, end = torch.cat((*scores, last), -1).softmax(-1), 0
    out = torch.zeros_like(q)
    for keys, there in seen:
        begin, end = end, end + there.shape[-1]
        out += torch.matmul(weights[..., begin:end], keys.float())
    return out
