"""Attention over cached latents (MLA): queries into the space of the latents, attention there, values out of it.

All heads share one key per token, so a tile holds many heads of a token and a cached vector is read once for all of
them, as key (all of it) and as value (its latent part). Four launches at most:

- `prepare`: the plain part of every query head times that head's key matrix, and, in programs of their own, the
  rotation of queries and key, the latent's norm and the write into the cache;
- `decode` for sequences with one new token: a sequence's cache is cut into shares, one per program, as in
  `kernels.decode`; the grid follows from host values;
- `merge`: what the shares of a sequence found, brought together, and for few tokens also the product with the value
  matrices; `head_products` otherwise;
- `prefill` for sequences with several new tokens: tiles of consecutive tokens times heads, as in `kernels.prefill`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import (
    FP8_MAX,
    INT8_MAX,
    LOG2E,
    ceil_div,
    launch,
    launch_successor,
    next_power_of_2,
    wait_for_inputs,
    widen,
)
from penstock.engine.backends.interface import AttentionBatch, LatentLayout, LatentWeights

NEGATIVE = tl.constexpr(-1.0e30)
FEW = 8
"""Up to this many sequences, `merge` also makes the values: more would read the value matrices too often."""


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


@triton.jit
def _absorb(
    q_ptr: tl.tensor,
    up_ptr: tl.tensor,
    query_ptr: tl.tensor,
    pid: tl.tensor,
    q_stride: tl.tensor,
    tokens: tl.tensor,
    tiles: tl.tensor,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    PLAIN: tl.constexpr,
    PLAIN_BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """The plain part of one head's queries, taken into a run of the latents' dimensions."""
    CACHED: tl.constexpr = LATENT + ROTARY
    t = pid % tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    head = pid // tiles % HEADS
    r = pid // (tiles * HEADS) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, PLAIN_BLOCK)
    row = t.to(tl.int64)
    x_at = q_ptr + (row * q_stride + head * (PLAIN + ROTARY))[:, None] + d[None, :]
    x = tl.load(x_at, mask=(t < tokens)[:, None] & (d < PLAIN)[None, :], other=0.0)
    w_at = up_ptr + head.to(tl.int64) * (PLAIN + VALUE) * LATENT + d[:, None] * LATENT + r[None, :]
    w = tl.load(w_at, mask=(d < PLAIN)[:, None] & (r < LATENT)[None, :], other=0.0)
    made = tl.dot(x, w, input_precision=PRECISION)
    to = query_ptr + ((row * HEADS + head) * CACHED)[:, None] + r[None, :]
    tl.store(to, made.to(query_ptr.dtype.element_ty), mask=(t < tokens)[:, None] & (r < LATENT)[None, :])


@triton.jit
def _turn_and_store(
    q_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    query_ptr: tl.tensor,
    token: tl.tensor,
    q_stride: tl.tensor,
    kv_stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    PLAIN: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr,
    INT8: tl.constexpr,
) -> None:
    """One token: its queries rotated, its latent normalized, its key rotated, and both stored."""
    HALF: tl.constexpr = ROTARY // 2
    CACHED: tl.constexpr = LATENT + ROTARY
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    i = tl.arange(0, HALF_BLOCK)
    in_half = i < HALF
    cos = tl.load(cos_sin_ptr + position * ROTARY + i, mask=in_half, other=1.0)
    sin = tl.load(cos_sin_ptr + position * ROTARY + HALF + i, mask=in_half, other=0.0)
    first = 2 * i if INTERLEAVED else i
    second = 2 * i + 1 if INTERLEAVED else HALF + i

    h = tl.arange(0, HEAD_BLOCK)
    mask = (h < HEADS)[:, None] & in_half[None, :]
    source = q_ptr + token * q_stride + (h * (PLAIN + ROTARY) + PLAIN)[:, None]
    low = tl.load(source + first[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + second[None, :], mask=mask, other=0.0).to(tl.float32)
    to = query_ptr + (token * HEADS + h)[:, None] * CACHED + LATENT + i[None, :]
    kind = query_ptr.dtype.element_ty
    tl.store(to, (low * cos[None, :] - high * sin[None, :]).to(kind), mask=mask)
    tl.store(to + HALF, (high * cos[None, :] + low * sin[None, :]).to(kind), mask=mask)

    r = tl.arange(0, LATENT_BLOCK)
    in_latent = r < LATENT
    x = tl.load(kv_ptr + token * kv_stride + r, mask=in_latent, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / LATENT + eps)
    x = (x * tl.load(norm_ptr + r, mask=in_latent, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    key = kv_ptr + token * kv_stride + LATENT
    low = tl.load(key + first, mask=in_half, other=0.0).to(tl.float32)
    high = tl.load(key + second, mask=in_half, other=0.0).to(tl.float32)
    turned = (low * cos - high * sin).to(kind).to(tl.float32)
    turned_high = (high * cos + low * sin).to(kind).to(tl.float32)
    if INT8:
        peak = tl.maximum(tl.max(tl.abs(turned), axis=0), tl.max(tl.abs(turned_high), axis=0))
        peak = tl.maximum(peak, tl.max(tl.abs(x), axis=0))
        scale = (peak / INT8_MAX).to(scale_ptr.dtype.element_ty)
        tl.store(scale_ptr + slot, scale)
        divisor = tl.where(scale > 0, scale.to(tl.float32), 1.0)
        x = tl.clamp(tl.floor(x / divisor + 0.5), -INT8_MAX, INT8_MAX)
        turned = tl.clamp(tl.floor(turned / divisor + 0.5), -INT8_MAX, INT8_MAX)
        turned_high = tl.clamp(tl.floor(turned_high / divisor + 0.5), -INT8_MAX, INT8_MAX)
    elif SCALED:
        divisor = tl.load(scale_ptr)
        x = tl.clamp(x / divisor, -FP8_MAX, FP8_MAX)
        turned = tl.clamp(turned / divisor, -FP8_MAX, FP8_MAX)
        turned_high = tl.clamp(turned_high / divisor, -FP8_MAX, FP8_MAX)
    stored = cache_ptr + slot * CACHED
    kept = cache_ptr.dtype.element_ty
    tl.store(stored + r, x.to(kept), mask=in_latent)
    tl.store(stored + LATENT + i, turned.to(kept), mask=in_half)
    tl.store(stored + LATENT + HALF + i, turned_high.to(kept), mask=in_half)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def _prepare_kernel(
    q_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    up_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    query_ptr: tl.tensor,
    q_stride: tl.tensor,
    kv_stride: tl.tensor,
    eps: tl.tensor,
    tokens: tl.tensor,
    tiles: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    PLAIN: tl.constexpr,
    PLAIN_BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr,
    INT8: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    COLUMNS: tl.constexpr = (LATENT + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    products = tiles * HEADS * COLUMNS
    if pid < products:
        _absorb(
            q_ptr, up_ptr, query_ptr, pid, q_stride, tokens, tiles,
            HEADS, LATENT, PLAIN, PLAIN_BLOCK, ROTARY, VALUE, BLOCK_T, BLOCK_R, PRECISION,
        )  # fmt: skip
    else:
        token = (pid - products).to(tl.int64)
        _turn_and_store(
            q_ptr, kv_ptr, norm_ptr, cos_sin_ptr, positions_ptr, slots_ptr, cache_ptr, scale_ptr, query_ptr, token,
            q_stride, kv_stride, eps, HEADS, HEAD_BLOCK, LATENT, LATENT_BLOCK, PLAIN, ROTARY, HALF_BLOCK, INTERLEAVED,
            SCALED, INT8,
        )  # fmt: skip


@triton.jit
def _attend(
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
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    INT8: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Fold cached tokens `begin..end` into the running softmax; unmasked tiles must be visible to every row."""
    CACHED: tl.constexpr = LATENT + ROTARY
    r = tl.arange(0, LATENT_BLOCK)
    e = tl.arange(0, ROTARY_BLOCK)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        # Past the context tables and slots hold anything, NaN included.
        inside = n < end if MASKED else n >= 0
        block = tl.load(table + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + n % BLOCK_SIZE
        at = cache_ptr + (slot * CACHED)[:, None]
        if MASKED:
            k = tl.load(at + r[None, :], mask=inside[:, None] & (r < LATENT)[None, :], other=0.0)
            k_turned = tl.load(at + LATENT + e[None, :], mask=inside[:, None] & (e < ROTARY)[None, :], other=0.0)
        elif LATENT == LATENT_BLOCK and ROTARY == ROTARY_BLOCK:
            k = tl.load(at + r[None, :])
            k_turned = tl.load(at + LATENT + e[None, :])
        else:
            k = tl.load(at + r[None, :], mask=(r < LATENT)[None, :], other=0.0)
            k_turned = tl.load(at + LATENT + e[None, :], mask=(e < ROTARY)[None, :], other=0.0)
        k = widen(k, q)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        qk = tl.dot(turned, tl.trans(widen(k_turned, q)), qk, input_precision=PRECISION) * scores
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


@triton.jit
def _shares(context: tl.tensor, min_tiles: tl.tensor, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr) -> tl.tensor:
    """Tiles of one share of a sequence, and how many shares there are."""
    tiles = tl.cdiv(context, BLOCK_N)
    share = tl.maximum(tl.cdiv(tiles, SPLITS), min_tiles)
    return share, tl.cdiv(tiles, share)


@triton.jit(do_not_specialize=["min_tiles"])
def _decode_kernel(
    query_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    peak_ptr: tl.tensor,
    total_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    context_ptr: tl.tensor,
    table_ptr: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    min_tiles: tl.tensor,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    HALF: tl.constexpr,
    INT8: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    seq = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    head = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    context = tl.load(context_ptr + seq)
    row = tl.maximum(tl.load(rows_ptr + seq), 0).to(tl.int64)
    r = tl.arange(0, LATENT_BLOCK)
    e = tl.arange(0, ROTARY_BLOCK)
    at = (seq * HEADS + head) * (LATENT + ROTARY)
    in_head = (head < HEADS)[:, None]
    q = tl.load(query_ptr + at[:, None] + r[None, :], mask=in_head & (r < LATENT)[None, :], other=0.0)
    turned = tl.load(query_ptr + (at + LATENT)[:, None] + e[None, :], mask=in_head & (e < ROTARY)[None, :], other=0.0)
    if HALF:
        # fp8 widens to float16 in one instruction, exactly.
        q = q.to(tl.float16)
        turned = turned.to(tl.float16)
    share, active = _shares(context, min_tiles, BLOCK_N, SPLITS)
    if split >= tl.maximum(active, 1):
        return
    scores = scale * LOG2E
    if SCALED and not INT8:
        scores *= tl.load(scale_ptr)
    peak = tl.full([TILE_M], NEGATIVE, tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, LATENT_BLOCK], tl.float32)
    begin = split * share * BLOCK_N
    end = tl.minimum(begin + share * BLOCK_N, context)
    acc, peak, total = _attend(
        q,
        turned,
        acc,
        peak,
        total,
        cache_ptr,
        scale_ptr,
        table_ptr + row * table_stride,
        begin,
        end,
        tl.full([TILE_M], 2147483647, tl.int32),
        scores,
        LATENT,
        LATENT_BLOCK,
        ROTARY,
        ROTARY_BLOCK,
        BLOCK_SIZE,
        BLOCK_N,
        True,
        INT8,
        PRECISION,
    )
    if SCALED and not INT8:
        acc *= tl.load(scale_ptr)
    mask = in_head & (r < LATENT)[None, :]
    if SPLITS == 1:
        # A sequence with no context (padding) gets zeros.
        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        to = seen_ptr + ((seq * HEADS + head) * LATENT)[:, None] + r[None, :]
        tl.store(to, acc.to(seen_ptr.dtype.element_ty), mask=mask)
    else:
        part = (seq * HEADS + head) * SPLITS + split
        tl.store(peak_ptr + part, peak, mask=head < HEADS)
        tl.store(total_ptr + part, total, mask=head < HEADS)
        tl.store(partial_ptr + (part * LATENT)[:, None] + r[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["min_tiles"])
def _merge_kernel(
    partial_ptr: tl.tensor,
    peak_ptr: tl.tensor,
    total_ptr: tl.tensor,
    context_ptr: tl.tensor,
    up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    min_tiles: tl.tensor,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    PLAIN: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    VALUES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    r = tl.arange(0, LATENT_BLOCK)
    s = tl.arange(0, SPLITS)
    _, active = _shares(tl.load(context_ptr + seq), min_tiles, BLOCK_N, SPLITS)
    seen = s < active
    part = (seq * HEADS + head) * SPLITS + s
    peaks = tl.load(peak_ptr + part, mask=seen, other=NEGATIVE)
    totals = tl.load(total_ptr + part, mask=seen, other=0.0)
    weight = tl.exp2(peaks - tl.max(peaks, axis=0))
    total = tl.sum(totals * weight, axis=0)
    weight = weight / tl.where(total > 0.0, total, 1.0)
    at = partial_ptr + (part * LATENT)[:, None] + r[None, :]
    found = tl.load(at, mask=seen[:, None] & (r < LATENT)[None, :], other=0.0)
    merged = tl.sum(found * weight[:, None], axis=0)
    kind = out_ptr.dtype.element_ty
    if VALUES:
        v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        w_at = up_ptr + ((head.to(tl.int64) * (PLAIN + VALUE) + PLAIN + v) * LATENT)[:, None] + r[None, :]
        w = tl.load(w_at, mask=(v < VALUE)[:, None] & (r < LATENT)[None, :], other=0.0).to(tl.float32)
        made = tl.sum(w * merged[None, :], axis=1)
        tl.store(out_ptr + (seq * HEADS + head) * VALUE + v, made.to(kind), mask=v < VALUE)
    else:
        tl.store(out_ptr + (seq * HEADS + head) * LATENT + r, merged.to(kind), mask=r < LATENT)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def _values_kernel(
    seen_ptr: tl.tensor,
    up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tokens: tl.tensor,
    tiles: tl.tensor,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    PLAIN: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    t = tl.program_id(0) % tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(0) // tiles
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    k = tl.arange(0, BLOCK_K)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    row = t.to(tl.int64) * HEADS + head
    x_at = seen_ptr + (row * LATENT)[:, None] + k[None, :]
    w_at = up_ptr + ((head.to(tl.int64) * (PLAIN + VALUE) + PLAIN + v) * LATENT)[:, None] + k[None, :]
    in_t, in_v = (t < tokens)[:, None], (v < VALUE)[:, None]
    acc = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    for start in range(0, LATENT, BLOCK_K):
        in_k = (start + k < LATENT)[None, :]
        x = tl.load(x_at + start, mask=in_t & in_k, other=0.0)
        w = tl.load(w_at + start, mask=in_v & in_k, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    to = out_ptr + (row * VALUE)[:, None] + v[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=in_t & (v < VALUE)[None, :])


@triton.jit(do_not_specialize=["first_seq", "num_seqs"])
def _prefill_kernel(
    query_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    context_ptr: tl.tensor,
    table_ptr: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    first_seq: tl.tensor,
    num_seqs: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALED: tl.constexpr,
    HALF: tl.constexpr,
    INT8: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    launch_successor(PDL)
    wait_for_inputs(PDL)

    # Which sequence: the last one whose first tile number is at or below ours; see `kernels.prefill`.
    origin = tl.load(starts_ptr + first_seq)
    before = 0
    for chunk in range(0, num_seqs, 256):
        i = chunk + tl.arange(0, 256)
        starts = tl.load(starts_ptr + first_seq + i, mask=i < num_seqs, other=0) - origin
        at_or_below = (starts // BLOCK_Q + i <= tile) & (i < num_seqs)
        before += tl.sum(at_or_below.to(tl.int32), axis=0)
    index = before - 1
    seq = first_seq + index
    begin = tl.load(starts_ptr + seq)
    length = tl.load(starts_ptr + seq + 1) - begin
    tiles = tl.cdiv(length, BLOCK_Q)
    local = tile - ((begin - origin) // BLOCK_Q + index)
    if local >= tiles:
        return
    offset = (tiles - 1 - local) * BLOCK_Q

    context = tl.load(context_ptr + seq)
    row = tl.maximum(tl.load(rows_ptr + seq), 0).to(tl.int64)
    table = table_ptr + row * table_stride
    m = tl.arange(0, BLOCK_M)
    r = tl.arange(0, LATENT_BLOCK)
    e = tl.arange(0, ROTARY_BLOCK)
    token = offset + m // GROUP
    head = tl.program_id(1) * GROUP + m % GROUP
    mask = ((m // GROUP < BLOCK_Q) & (token < length) & (head < HEADS))[:, None]
    at = (begin + token).to(tl.int64) * HEADS + head
    source = query_ptr + (at * (LATENT + ROTARY))[:, None]
    q = tl.load(source + r[None, :], mask=mask & (r < LATENT)[None, :], other=0.0)
    turned = tl.load(source + LATENT + e[None, :], mask=mask & (e < ROTARY)[None, :], other=0.0)
    if HALF:
        q = q.to(tl.float16)
        turned = turned.to(tl.float16)
    scores = scale * LOG2E
    if SCALED and not INT8:
        scores *= tl.load(scale_ptr)
    past = context - length
    position = past + token
    lowest = past + offset
    end = tl.minimum(lowest + BLOCK_Q, context)
    masked_from = (lowest + 1) // BLOCK_N * BLOCK_N
    peak = tl.full([BLOCK_M], NEGATIVE, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, LATENT_BLOCK], tl.float32)
    acc, peak, total = _attend(
        q,
        turned,
        acc,
        peak,
        total,
        cache_ptr,
        scale_ptr,
        table,
        0,
        masked_from,
        position,
        scores,
        LATENT,
        LATENT_BLOCK,
        ROTARY,
        ROTARY_BLOCK,
        BLOCK_SIZE,
        BLOCK_N,
        False,
        INT8,
        PRECISION,
    )
    acc, peak, total = _attend(
        q,
        turned,
        acc,
        peak,
        total,
        cache_ptr,
        scale_ptr,
        table,
        masked_from,
        end,
        position,
        scores,
        LATENT,
        LATENT_BLOCK,
        ROTARY,
        ROTARY_BLOCK,
        BLOCK_SIZE,
        BLOCK_N,
        True,
        INT8,
        PRECISION,
    )
    if SCALED and not INT8:
        acc *= tl.load(scale_ptr)
    acc = acc / total[:, None]
    to = seen_ptr + (at * LATENT)[:, None] + r[None, :]
    tl.store(to, acc.to(seen_ptr.dtype.element_ty), mask=mask & (r < LATENT)[None, :])


def choose_decode(sequences: int, layout: LatentLayout, element_size: int, processors: int) -> LatentConfig:
    """Launch shape from host values: about two programs per multiprocessor, and shares that are worth a merge."""
    tile = max(16, min(16 if element_size == 4 else 64, next_power_of_2(layout.heads)))
    block_n = 16 if element_size == 4 else 32
    programs = sequences * ceil_div(layout.heads, tile)
    splits = min(32, next_power_of_2(ceil_div(2 * processors, programs)))
    load = programs / processors
    shortest = 64 if load < 0.2 else 256 if load < 1.2 else 1024
    return LatentConfig(
        tile, block_n, num_warps=8 if tile == 64 else 4, num_stages=3 if tile < 64 else 2, splits=splits,
        min_tiles=shortest // block_n,
    )  # fmt: skip


def choose_prefill(layout: LatentLayout, element_size: int) -> LatentConfig:
    if element_size == 4:
        return LatentConfig(16, 16, num_warps=4, num_stages=1)
    return LatentConfig(64, 32, num_warps=8, num_stages=2)


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def prepare(
    q: Tensor,
    kv: Tensor,
    layout: LatentLayout,
    weights: LatentWeights,
    cos_sin: Tensor,
    batch: AttentionBatch,
    cache: Tensor,
    scales: Tensor | None,
    *,
    pdl: bool = False,
) -> Tensor:
    """Store the new tokens; the queries in the space of what is cached, [T, heads, latent + rotary]."""
    tokens = q.shape[0]
    query = torch.empty((tokens, layout.heads, layout.cached), dtype=q.dtype, device=q.device)
    block_t = 16 if tokens <= 16 else 32 if tokens <= 256 else 64
    block_r = max(16, min(64, next_power_of_2(layout.latent)))
    tiles = ceil_div(tokens, block_t)
    products = tiles * layout.heads * ceil_div(layout.latent, block_r)
    launch(
        _prepare_kernel,
        (products + tokens,),
        q,
        kv,
        weights.up,
        weights.norm,
        cos_sin,
        batch.positions,
        batch.slots,
        cache,
        cos_sin if scales is None else scales,
        query,
        q.stride(0),
        kv.stride(0),
        weights.eps,
        tokens,
        tiles,
        HEADS=layout.heads,
        HEAD_BLOCK=next_power_of_2(layout.heads),
        LATENT=layout.latent,
        LATENT_BLOCK=next_power_of_2(layout.latent),
        PLAIN=layout.plain,
        PLAIN_BLOCK=max(16, next_power_of_2(layout.plain)),
        ROTARY=layout.rotary,
        HALF_BLOCK=next_power_of_2(layout.rotary // 2),
        VALUE=layout.value,
        BLOCK_T=block_t,
        BLOCK_R=block_r,
        INTERLEAVED=layout.interleaved,
        SCALED=scales is not None,
        INT8=cache.dtype == torch.int8,
        PRECISION=_precision(q),
        num_warps=4,
        pdl=pdl,
    )
    return query


def decode(
    query: Tensor,
    layout: LatentLayout,
    weights: LatentWeights,
    batch: AttentionBatch,
    cache: Tensor,
    scales: Tensor | None,
    config: LatentConfig,
    *,
    seen: Tensor | None = None,
    values: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Attention of the batch's first `num_decodes` sequences, into `seen` [T, heads, latent] or, taken out of the
    latents' space, into `values` [T, heads * value]."""
    sequences, heads, splits = batch.num_decodes, layout.heads, config.splits
    if values is not None:
        splits = max(2, splits)
    parts = sequences * heads * splits if splits > 1 else 0
    stats = torch.empty((2, parts), dtype=torch.float32, device=query.device)
    partial = torch.empty((parts, layout.latent), dtype=torch.float32, device=query.device)
    latent_block = max(16, next_power_of_2(layout.latent))
    launch(
        _decode_kernel,
        (sequences, ceil_div(heads, config.tile), splits),
        query,
        cache,
        query if scales is None else scales,
        query if seen is None else seen,
        partial,
        stats[0],
        stats[1],
        batch.rows,
        batch.context_lens,
        batch.block_tables,
        batch.block_tables.stride(0),
        layout.scale,
        config.min_tiles,
        HEADS=heads,
        LATENT=layout.latent,
        LATENT_BLOCK=latent_block,
        ROTARY=layout.rotary,
        ROTARY_BLOCK=max(16, next_power_of_2(layout.rotary)),
        BLOCK_SIZE=cache.shape[1],
        TILE_M=config.tile,
        BLOCK_N=config.block_n,
        SPLITS=splits,
        SCALED=scales is not None,
        HALF=cache.dtype == torch.float8_e4m3fn and query.dtype != torch.float32,
        INT8=cache.dtype == torch.int8,
        PRECISION=_precision(query),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        pdl=pdl,
    )
    if splits == 1:
        return
    out = seen if values is None else values
    block_v = min(32, next_power_of_2(layout.value))
    launch(
        _merge_kernel,
        (sequences, heads, 1 if values is None else ceil_div(layout.value, block_v)),
        partial,
        stats[0],
        stats[1],
        batch.context_lens,
        weights.up,
        out,
        config.min_tiles,
        HEADS=heads,
        LATENT=layout.latent,
        LATENT_BLOCK=latent_block,
        PLAIN=layout.plain,
        VALUE=layout.value,
        BLOCK_V=block_v,
        BLOCK_N=config.block_n,
        SPLITS=splits,
        VALUES=values is not None,
        num_warps=8,
        pdl=pdl,
    )


def prefill(
    query: Tensor,
    layout: LatentLayout,
    batch: AttentionBatch,
    cache: Tensor,
    scales: Tensor | None,
    seen: Tensor,
    config: LatentConfig,
    *,
    pdl: bool = False,
) -> None:
    """Attention of every sequence after the first `num_decodes`, into `seen` [T, heads, latent]."""
    group = min(layout.heads, config.tile)
    block_q = config.tile // group
    sequences, tokens = batch.context_lens.shape[0] - batch.num_decodes, query.shape[0] - batch.num_decodes
    launch(
        _prefill_kernel,
        (tokens // block_q + sequences, ceil_div(layout.heads, group)),
        query,
        cache,
        query if scales is None else scales,
        seen,
        batch.rows,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        batch.block_tables.stride(0),
        layout.scale,
        batch.num_decodes,
        sequences,
        HEADS=layout.heads,
        GROUP=group,
        LATENT=layout.latent,
        LATENT_BLOCK=max(16, next_power_of_2(layout.latent)),
        ROTARY=layout.rotary,
        ROTARY_BLOCK=max(16, next_power_of_2(layout.rotary)),
        BLOCK_SIZE=cache.shape[1],
        BLOCK_M=config.tile,
        BLOCK_Q=block_q,
        BLOCK_N=config.block_n,
        SCALED=scales is not None,
        HALF=cache.dtype == torch.float8_e4m3fn and query.dtype != torch.float32,
        INT8=cache.dtype == torch.int8,
        PRECISION=_precision(query),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        pdl=pdl,
    )


def values_of(seen: Tensor, layout: LatentLayout, weights: LatentWeights, out: Tensor, *, pdl: bool = False) -> None:
    """Every head's sums of latents [T, heads, latent] times its value matrix, into `out` [T, heads * value]."""
    tokens = seen.shape[0]
    block_t = 16 if tokens <= 16 else 32 if tokens <= 256 else 64
    block_v = max(16, min(64, next_power_of_2(layout.value)))
    tiles = ceil_div(tokens, block_t)
    launch(
        _values_kernel,
        (tiles * layout.heads, ceil_div(layout.value, block_v)),
        seen,
        weights.up,
        out,
        tokens,
        tiles,
        HEADS=layout.heads,
        LATENT=layout.latent,
        PLAIN=layout.plain,
        VALUE=layout.value,
        BLOCK_T=block_t,
        BLOCK_V=block_v,
        BLOCK_K=max(16, min(32 if seen.element_size() == 4 else 128, next_power_of_2(layout.latent))),
        PRECISION=_precision(seen),
        num_warps=4,
        num_stages=3,
        pdl=pdl,
    )
