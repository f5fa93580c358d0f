"""What attention to a part of the context reads: the cached tokens that were chosen, and the tokens of a step that see
everything, as a step of their own. See `block_index` and `sparse_blocks`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import FP8, AttentionBatch, HeadLayout, KVScales
from penstock.engine.backends.reference.latent import rotate


class Caches:
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


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def turned(x: Tensor, table: Tensor) -> Tensor:
    """The first dimensions, as many as the table has, rotated."""
    rotary = table.shape[-1]
    found = rotate(x[..., :rotary], table[..., : rotary // 2], table[..., rotary // 2 :], False)
    return torch.cat((found, x[..., rotary:]), -1)


def slots_of(tables: Tensor, positions: Tensor, size: int) -> Tensor:
    """Of tokens at `positions` [N, n] of sequences whose tables are `tables` [N, blocks], or of one sequence."""
    blocks = tables[positions // size] if tables.dim() == 1 else tables.gather(1, positions // size)
    return blocks.long() * size + positions % size


def leading(batch: AttentionBatch, counts: list[int]) -> tuple[Tensor, AttentionBatch]:
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
