"""What kernels over cached latents share: the running softmax of a tile of queries over cached tokens.

All heads share one key per token, so a tile holds many heads of a token and a cached vector is read once for all of
them, as key (all of it) and as value (its latent part).

Tokens come one after the other through a sequence's block table, or from a list of slots that were chosen for a token
(`index_choice`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import widen

NEGATIVE = tl.constexpr(-1.0e30)
TABLE = tl.constexpr(0)
"""Where tokens come from: the block table,"""
EITHER = tl.constexpr(1)
"""a list where there is one, as is known when the kernel runs,"""
LIST = tl.constexpr(2)
"""or always a list."""


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Shape of a launch of `decode` or `prefill`."""

    tile: int
    """Rows: heads, or tokens times heads."""
    block_n: int
    num_warps: int
    num_stages: int
    splits: int = 1
    min_tiles: int = 1


@dataclass(frozen=True, slots=True)
class ChosenSlots:
    """What the tokens of a step attend to, where something had to be chosen."""

    slots: Tensor
    """int32 [T, most]: cache slots in the order of positions, as many as `seen` says."""
    seen: Tensor
    """int32 [T]: tokens that each could see, of which the best `most` were chosen; 0 where it sees all of them because
    its sequence has no more than `most`."""

    @property
    def most(self) -> int:
        return self.slots.shape[1]

    def part(self, tokens: slice) -> ChosenSlots:
        return ChosenSlots(self.slots[tokens], self.seen[tokens])


@triton.jit
def attend(
    q: tl.tensor,
    turned: tl.tensor,
    acc: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    cache_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    table: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    position: tl.tensor,
    scores: tl.tensor,
    list_ptr: tl.tensor,
    listed: tl.tensor,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    INT8: tl.constexpr,
    SOURCE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Fold cached tokens `begin..end` into the running softmax; unmasked tiles must be visible to every row. `listed`:
    whether they are those of `list_ptr`, which are masked. Where nothing is rotated `turned` is not read."""
    CACHED: tl.constexpr = LATENT + ROTARY
    r = tl.arange(0, LATENT_BLOCK)
    e = tl.arange(0, ROTARY_BLOCK)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        # Past the context tables and slots hold anything, NaN included.
        inside = n < end if MASKED else n >= 0
        if SOURCE == LIST:
            slot = tl.load(list_ptr + n, mask=inside, other=0).to(tl.int64)
            at = cache_ptr + (slot * CACHED)[:, None]
        elif SOURCE == EITHER:
            slot = tl.load(list_ptr + n, mask=inside & listed, other=0).to(tl.int64)
            block = tl.load(table + n // BLOCK_SIZE, mask=inside & (listed == 0), other=0).to(tl.int64)
            offset = tl.where(listed, slot * CACHED, block * (BLOCK_SIZE * CACHED) + n % BLOCK_SIZE * CACHED)
            slot = tl.where(listed, slot, block * BLOCK_SIZE + n % BLOCK_SIZE)
            at = cache_ptr + offset[:, None]
        else:
            block = tl.load(table + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            slot = block * BLOCK_SIZE + n % BLOCK_SIZE
            # Not slot * CACHED: Triton would take every row to be aligned as the first of its block is.
            at = cache_ptr + (block * (BLOCK_SIZE * CACHED) + n % BLOCK_SIZE * CACHED)[:, None]
        if MASKED:
            k = tl.load(at + r[None, :], mask=inside[:, None] & (r < LATENT)[None, :], other=0.0)
            if ROTARY > 0:
                k_turned = tl.load(at + LATENT + e[None, :], mask=inside[:, None] & (e < ROTARY)[None, :], other=0.0)
        elif LATENT == LATENT_BLOCK and (ROTARY == ROTARY_BLOCK or ROTARY == 0):
            k = tl.load(at + r[None, :])
            if ROTARY > 0:
                k_turned = tl.load(at + LATENT + e[None, :])
        else:
            k = tl.load(at + r[None, :], mask=(r < LATENT)[None, :], other=0.0)
            if ROTARY > 0:
                k_turned = tl.load(at + LATENT + e[None, :], mask=(e < ROTARY)[None, :], other=0.0)
        k = widen(k, q)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if ROTARY > 0:
            qk = tl.dot(turned, tl.trans(widen(k_turned, q)), qk, input_precision=PRECISION) * scores
        else:
            qk *= scores
        if INT8:
            scale = tl.load(scale_ptr + slot, mask=inside, other=0.0).to(tl.float32)
            qk *= scale[None, :]
        if MASKED:
            qk = tl.where(inside[None, :] & (n[None, :] <= position[:, None]), qk, NEGATIVE)
        new_peak = tl.maximum(peak, tl.max(qk, axis=1))
        decay = tl.exp2(peak - new_peak)
        p = tl.exp2(qk - new_peak[:, None])
        total = total * decay + tl.sum(p, axis=1)
        acc = acc * decay[:, None]
        if INT8:
            p *= scale[None, :]
        acc = tl.dot(p.to(q.dtype), k, acc, input_precision=PRECISION)
        peak = new_peak
    return acc, peak, total


def precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
