"""What an indexer stores and asks with: keys normalized, rotated and stored; queries rotated, and how much each token
sees.

A token's number of *seen* tokens is 0 where its sequence has no more tokens than may be chosen: nothing is chosen for
it then, and no kernel of `index_scores` and `index_choice` does anything.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import launch, launch_successor, next_power_of_2, wait_for_inputs
from penstock.engine.backends.interface import AttentionBatch, IndexLayout, IndexNorm

DIGITS = 4
VALUES = 256
"""Of a digit; see `index_choice`."""


@triton.jit
def _normed(
    x: tl.tensor, mean: tl.tensor, factor: tl.tensor, weight: tl.tensor, bias: tl.tensor, KIND: tl.constexpr
) -> tl.tensor:
    """Rounded as a LayerNorm of its own would be."""
    return ((x - mean) * factor * weight + bias).to(KIND).to(tl.float32)


@triton.jit
def _store_kernel(
    key_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    stride: tl.tensor,
    eps: tl.tensor,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    HALF: tl.constexpr = ROTARY // 2
    token = tl.program_id(0).to(tl.int64)
    launch_successor(PDL)
    d = tl.arange(0, DIM_BLOCK)
    i = tl.arange(0, HALF_BLOCK)
    in_half = i < HALF
    rest = (d >= ROTARY) & (d < DIM)
    first = 2 * i if INTERLEAVED else i
    second = 2 * i + 1 if INTERLEAVED else HALF + i
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    cos = tl.load(cos_sin_ptr + position * ROTARY + i, mask=in_half, other=1.0)
    sin = tl.load(cos_sin_ptr + position * ROTARY + HALF + i, mask=in_half, other=0.0)
    gain = tl.load(weight_ptr + d, mask=rest, other=0.0).to(tl.float32)
    gain_low = tl.load(weight_ptr + first, mask=in_half, other=0.0).to(tl.float32)
    gain_high = tl.load(weight_ptr + second, mask=in_half, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + d, mask=rest, other=0.0).to(tl.float32)
    bias_low = tl.load(bias_ptr + first, mask=in_half, other=0.0).to(tl.float32)
    bias_high = tl.load(bias_ptr + second, mask=in_half, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    source = key_ptr + token * stride
    x = tl.load(source + d, mask=d < DIM, other=0.0).to(tl.float32)
    low = tl.load(source + first, mask=in_half, other=0.0).to(tl.float32)
    high = tl.load(source + second, mask=in_half, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / DIM
    apart = tl.where(d < DIM, x - mean, 0.0)
    factor = tl.rsqrt(tl.sum(apart * apart, axis=0) / DIM + eps)
    kind = cache_ptr.dtype.element_ty
    x = _normed(x, mean, factor, gain, bias, kind)
    low = _normed(low, mean, factor, gain_low, bias_low, kind)
    high = _normed(high, mean, factor, gain_high, bias_high, kind)
    to = cache_ptr + slot * DIM
    tl.store(to + i, (low * cos - high * sin).to(kind), mask=in_half)
    tl.store(to + HALF + i, (high * cos + low * sin).to(kind), mask=in_half)
    tl.store(to + d, x.to(kind), mask=rest)


def store_keys(
    keys: Tensor,
    norm: IndexNorm,
    layout: IndexLayout,
    cos_sin: Tensor,
    batch: AttentionBatch,
    cache: Tensor,
    *,
    pdl: bool = False,
) -> None:
    """See `IndexOps.store_index_keys`."""
    launch(
        _store_kernel,
        (keys.shape[0],),
        keys,
        norm.weight,
        norm.bias,
        cos_sin,
        batch.positions,
        batch.slots,
        cache,
        keys.stride(0),
        norm.eps,
        DIM=layout.dim,
        DIM_BLOCK=next_power_of_2(layout.dim),
        ROTARY=layout.rotary,
        HALF_BLOCK=next_power_of_2(layout.rotary // 2),
        INTERLEAVED=layout.interleaved,
        num_warps=1,
        pdl=pdl,
    )


@triton.jit(do_not_specialize=["first_token", "decodes", "prompts"])
def _ask_kernel(
    query_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    context_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    turned_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    row_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    stride: tl.tensor,
    first_token: tl.tensor,
    decodes: tl.tensor,
    prompts: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    MOST: tl.constexpr,
    COUNTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    HALF: tl.constexpr = ROTARY // 2
    local = tl.program_id(0).to(tl.int64)
    token = first_token + tl.program_id(0)
    launch_successor(PDL)
    # The last sequence that begins at or before the token; the first ones have one token each.
    before = 0
    for chunk in range(0, tl.where(token < decodes, 0, prompts), 256):
        s = chunk + tl.arange(0, 256)
        starts = tl.load(starts_ptr + decodes + s, mask=s < prompts, other=2147483647)
        before += tl.sum((starts <= token).to(tl.int32), axis=0)
    seq = tl.where(token < decodes, token, decodes + before - 1)
    context = tl.load(context_ptr + seq)
    seen = context - (tl.load(starts_ptr + seq + 1) - 1 - token)
    seen = tl.where(context > MOST, seen, 0)
    row = tl.maximum(tl.load(rows_ptr + seq), 0)
    position = tl.load(positions_ptr + token)
    i = tl.arange(0, HALF_BLOCK)
    in_half = i < HALF
    cos = tl.load(cos_sin_ptr + position * ROTARY + i, mask=in_half, other=1.0)[None, :]
    sin = tl.load(cos_sin_ptr + position * ROTARY + HALF + i, mask=in_half, other=0.0)[None, :]
    wait_for_inputs(PDL)
    tl.store(seen_ptr + local, seen)
    tl.store(row_ptr + local, row)
    if seen > MOST:
        c = tl.arange(0, COUNTS)
        tl.store(counts_ptr + local * COUNTS + c, tl.zeros([COUNTS], tl.int32))
        h = tl.arange(0, HEAD_BLOCK)[:, None]
        d = tl.arange(0, DIM_BLOCK)[None, :]
        rest = (h < HEADS) & (d >= ROTARY) & (d < DIM)
        pairs = (h < HEADS) & in_half[None, :]
        first = 2 * i if INTERLEAVED else i
        second = 2 * i + 1 if INTERLEAVED else HALF + i
        source = query_ptr + local * stride + h * DIM
        to = turned_ptr + (local * HEADS + h) * DIM
        low = tl.load(source + first[None, :], mask=pairs, other=0.0).to(tl.float32)
        high = tl.load(source + second[None, :], mask=pairs, other=0.0).to(tl.float32)
        kind = turned_ptr.dtype.element_ty
        tl.store(to + i[None, :], (low * cos - high * sin).to(kind), mask=pairs)
        tl.store(to + HALF + i[None, :], (high * cos + low * sin).to(kind), mask=pairs)
        tl.store(to + d, tl.load(source + d, mask=rest, other=0.0), mask=rest)


def ask(
    queries: Tensor,
    layout: IndexLayout,
    cos_sin: Tensor,
    batch: AttentionBatch,
    first: int,
    seen: Tensor,
    *,
    pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [n, heads, dim] of the tokens from `first` on, the rows of their block tables int32 [n], and
    zeros int32 [n, DIGITS, VALUES]. What they see is written into `seen` int32 [n]. Queries and zeros are undefined
    where nothing has to be scored."""
    tokens, device = queries.shape[0], queries.device
    turned = torch.empty((tokens, layout.heads, layout.dim), dtype=queries.dtype, device=device)
    rows = torch.empty(tokens, dtype=torch.int32, device=device)
    counts = torch.empty((tokens, DIGITS, VALUES), dtype=torch.int32, device=device)
    launch(
        _ask_kernel,
        (tokens,),
        queries,
        cos_sin,
        batch.positions,
        batch.query_starts,
        batch.context_lens,
        batch.rows,
        turned,
        seen,
        rows,
        counts,
        queries.stride(0),
        first,
        batch.num_decodes,
        batch.context_lens.shape[0] - batch.num_decodes,
        HEADS=layout.heads,
        HEAD_BLOCK=next_power_of_2(layout.heads),
        DIM=layout.dim,
        DIM_BLOCK=next_power_of_2(layout.dim),
        ROTARY=layout.rotary,
        HALF_BLOCK=next_power_of_2(layout.rotary // 2),
        INTERLEAVED=layout.interleaved,
        MOST=layout.most,
        COUNTS=DIGITS * VALUES,
        num_warps=4,
        pdl=pdl,
    )
    return turned, rows, counts
