"""Attention of long chunks on Hopper: bulk copies and tensor cores kept busy by specialised warps.

The job of `prefill` for head dimension 128 and a 16-bit cache, written in Gluon. A program owns `BLOCK_M` rows
(consecutive tokens times the query heads of one KV head) in two warpgroups of 64 rows. A producer warp fetches key and
value tiles with TMA into a ring of `STAGES` shared-memory tiles (`hopper_tiles`); each warpgroup multiplies with them
and takes its softmax beside the other's products (`hopper_consumer`).

Tiles run from the diagonal down to key 0: only the first ones need a mask. Slots past the end of a sequence may hold
anything, NaN included: scores there are masked, and the rows of the value tile are cleared before they are multiplied.

A quantized cache is gathered first (`gathered_prefix`), some heads at a time: then tiles are contiguous, each two
copies instead of sixteen. So is a 16-bit cache where each key is read often enough to pay for it. Products are of
16-bit numbers, or over an FP8 cache, if asked for, of FP8 (`hopper_fp8_consumer`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from penstock.engine.backends.cuda.kernels.common import launch
from penstock.engine.backends.cuda.kernels.gathered_prefix import (
    MOST_BYTES,
    GatheredPrefix,
    gather,
    heads_at_once,
    make_room,
)
from penstock.engine.backends.cuda.kernels.gathered_prefix import TILE as GATHERED_ROWS
from penstock.engine.backends.cuda.kernels.hopper_consumer import consumer
from penstock.engine.backends.cuda.kernels.hopper_fp8_consumer import fp8_consumer
from penstock.engine.backends.cuda.kernels.hopper_tiles import contiguous_producer, fp8_producer, paged_producer
from penstock.engine.backends.interface import AttentionBatch, HeadLayout

DIM = 128
BLOCK_SIZE = 16
BLOCK_M = 128
_COMPUTED = (torch.bfloat16, torch.float16)
STAGES = 2
FP8_STAGES = 4
FROM_TOKENS = 512
"""Longest chunk of a step from which this kernel is faster than `prefill` (measured on an H200)."""
_LEAST_QUERY = gl.constexpr(1.0e-20)
"""Of the largest number of a row in FP8: rows of zeros have a scale too, and infinite scores times it stay infinite."""
BOX_BYTES = 128
"""Of one row of a TMA box: the width of the swizzle."""
LEAST_REUSE = 3072
"""New tokens that read each key, on average, from which 16-bit keys are gathered. Copying one costs as much as 86 new
tokens that attend to it; contiguous tiles gain some 4% (measured on an H200)."""


@gluon.jit(
    do_not_specialize=[
        "first_seq",
        "num_seqs",
        "num_tiles",
        "longest_first",
        "first_head",
        "num_heads",
        "gathered_rows",
    ]
)
def _hopper_prefill_kernel(
    k_desc: tma.tensor_descriptor,
    v_desc: tma.tensor_descriptor,
    q_ptr: gl.tensor,
    out_ptr: gl.tensor,
    rows_ptr: gl.tensor,
    starts_ptr: gl.tensor,
    context_ptr: gl.tensor,
    table_ptr: gl.tensor,
    k_scale_ptr: gl.tensor,
    v_scale_ptr: gl.tensor,
    q_stride: gl.tensor,
    table_stride: gl.tensor,
    scale: gl.tensor,
    first_seq: gl.tensor,
    num_seqs: gl.tensor,
    num_tiles: gl.tensor,
    longest_first: gl.tensor,
    first_head: gl.tensor,
    num_heads: gl.tensor,
    gathered_rows: gl.tensor,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    STAGES: gl.constexpr,
    GATHERED: gl.constexpr,
    FP8: gl.constexpr,
    SCALED: gl.constexpr,
    PDL: gl.constexpr,
) -> None:
    """`GATHERED`: over `num_heads` heads from `first_head` on, whose keys lie `gathered_rows` from each other, and
    `table_ptr` is where sequences begin. `FP8`: gathered for `hopper_fp8_consumer`. `SCALED`: keys and values of a head
    have one scale. `PDL` is always false: it waits for its predecessors in the ordinary way."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 if FP8 else 16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    kept: gl.constexpr = gl.float8e4nv if FP8 else dtype
    # Longest first: the longest tiles of all heads before shorter ones. Otherwise head after head, which shares more
    # keys in the L2 cache.
    program = gl.program_id(0)
    if GATHERED:
        here = gl.where(longest_first != 0, program % num_heads, program // num_tiles)
        tile = gl.where(longest_first != 0, program // num_heads, program % num_tiles)
        kv_head = first_head + here
    else:
        kv_head = gl.where(longest_first != 0, program % KV_HEADS, program // num_tiles)
        tile = gl.where(longest_first != 0, program // KV_HEADS, program % num_tiles)

    # Which sequence: the last one whose first tile number is at or below ours.
    origin = gl.load(starts_ptr + first_seq)
    before = 0
    for chunk in range(0, num_seqs, 256):
        i = chunk + gl.arange(0, 256, layout=FLAT)
        starts = gl.load(starts_ptr + first_seq + i, mask=i < num_seqs, other=0) - origin
        at_or_below = (starts // BLOCK_Q + i <= tile) & (i < num_seqs)
        before += gl.sum(at_or_below.to(gl.int32), axis=0)
    index = before - 1
    seq = first_seq + index
    begin = gl.load(starts_ptr + seq)
    length = gl.load(starts_ptr + seq + 1) - begin
    count = gl.cdiv(length, BLOCK_Q)
    local = tile - ((begin - origin) // BLOCK_Q + index)
    if local < count:
        # The last tile of a sequence sees the most keys: start with it, so that the launch ends on short ones.
        offset = (count - 1 - local) * BLOCK_Q
        context = gl.load(context_ptr + seq)
        if SCALED:
            scale = scale * gl.load(k_scale_ptr + kv_head)
        past = context - length
        lowest = past + offset
        end = gl.minimum(lowest + BLOCK_Q, context)
        tiles = gl.cdiv(end, 128)
        clear = (lowest + 1) // 128
        masked = gl.maximum(tiles - clear, 1)

        q_tiles = gl.allocate_shared_memory(kept, [2, 64, 128], TILE)
        if FP8:
            q_scales = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
            o_tiles = gl.allocate_shared_memory(
                gl.float32, [2, 32, 256], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
            )
            k_tiles = gl.allocate_shared_memory(kept, [STAGES, 128, 128], TILE)
            v_tiles = gl.allocate_shared_memory(kept, [STAGES, 128, 128], TILE)
        else:
            BOX_ROWS: gl.constexpr = 128 if GATHERED else 16
            k_boxes = gl.allocate_shared_memory(dtype, [STAGES * 256 // BOX_ROWS, BOX_ROWS, 64], TILE)
            v_boxes = gl.allocate_shared_memory(dtype, [STAGES * 256 // BOX_ROWS, BOX_ROWS, 64], TILE)
            k_tiles = k_boxes._reinterpret(dtype, [STAGES, 128, 128], TILE)
            v_tiles = v_boxes._reinterpret(dtype, [STAGES, 128, 128], TILE)
        k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        for s in gl.static_range(STAGES):
            mbarrier.init(k_ready.index(s), count=1)
            mbarrier.init(v_ready.index(s), count=1)
            mbarrier.init(k_free.index(s), count=2)
            mbarrier.init(v_free.index(s), count=2)
        d = gl.arange(0, 128, layout=gl.SliceLayout(0, LOADED))
        for half in gl.static_range(2):
            m = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LOADED))
            token = offset + m // GROUP
            column = (kv_head * GROUP + m % GROUP) * 128
            at = ((begin + token).to(gl.int64) * q_stride + column)[:, None] + d[None, :]
            present = (m // GROUP < BLOCK_Q) & (token < length)
            q = gl.load(q_ptr + at, mask=present[:, None], other=0.0)
            if FP8:
                q = q.to(gl.float32)
                q_scale = gl.maximum(gl.max(gl.abs(q), 1), _LEAST_QUERY) * (1.0 / 448.0)
                q_scales.index(half).store(q_scale)
                q = (q / q_scale[:, None]).to(kept)
            q_tiles.index(half).store(q)
        fence_async_shared()
        if FP8:
            first_row = here * gathered_rows + gl.load(table_ptr + index)
            gl.warp_specialize(
                [
                    (
                        fp8_consumer,
                        (0, q_tiles, q_scales, o_tiles, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, out_ptr,
                         begin, offset, length, past, tiles, masked, kv_head, scale, v_scale_ptr, KV_HEADS, GROUP,
                         BLOCK_Q, STAGES, SCALED),
                    ),
                    (
                        fp8_consumer,
                        (1, q_tiles, q_scales, o_tiles, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, out_ptr,
                         begin, offset, length, past, tiles, masked, kv_head, scale, v_scale_ptr, KV_HEADS, GROUP,
                         BLOCK_Q, STAGES, SCALED),
                    ),
                    (
                        fp8_producer,
                        (k_desc, v_desc, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, first_row, tiles, STAGES),
                    ),
                ],
                [4, 1],
                [240, 24],
            )  # fmt: skip
        elif GATHERED:
            first_row = here * gathered_rows + gl.load(table_ptr + index)
            gl.warp_specialize(
                [
                    (
                        consumer,
                        (0, q_tiles, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, out_ptr, begin, offset, length,
                         context, past, tiles, masked, kv_head, scale, v_scale_ptr, KV_HEADS, GROUP, BLOCK_Q, STAGES,
                         SCALED),
                    ),
                    (
                        consumer,
                        (1, q_tiles, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, out_ptr, begin, offset, length,
                         context, past, tiles, masked, kv_head, scale, v_scale_ptr, KV_HEADS, GROUP, BLOCK_Q, STAGES,
                         SCALED),
                    ),
                    (
                        contiguous_producer,
                        (k_desc, v_desc, k_boxes, v_boxes, k_ready, k_free, v_ready, v_free, first_row, tiles, STAGES),
                    ),
                ],
                [4, 1],
                [240, 24],
            )  # fmt: skip
        else:
            row = gl.maximum(gl.load(rows_ptr + seq), 0).to(gl.int64)
            table = table_ptr + row * table_stride
            last_block = (context - 1) // 16
            gl.warp_specialize(
                [
                    (
                        consumer,
                        (0, q_tiles, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, out_ptr, begin, offset, length,
                         context, past, tiles, masked, kv_head, scale, v_scale_ptr, KV_HEADS, GROUP, BLOCK_Q, STAGES,
                         SCALED),
                    ),
                    (
                        consumer,
                        (1, q_tiles, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, out_ptr, begin, offset, length,
                         context, past, tiles, masked, kv_head, scale, v_scale_ptr, KV_HEADS, GROUP, BLOCK_Q, STAGES,
                         SCALED),
                    ),
                    (
                        paged_producer,
                        (k_desc, v_desc, k_boxes, v_boxes, k_ready, k_free, v_ready, v_free, table, last_block, tiles,
                         kv_head, KV_HEADS, STAGES),
                    ),
                ],
                [4, 1],
                [240, 24],
            )  # fmt: skip


def fits(layout: HeadLayout) -> bool:
    """Whether this kernel computes attention of such heads, with contexts inside their window."""
    return layout.head_dim == DIM and layout.heads <= BLOCK_M * layout.kv_heads and not layout.softcap


def gathered_bytes(layout: HeadLayout, dtype: torch.dtype) -> int:
    """What is gathered of a cache of `dtype` at a time, at most."""
    return MOST_BYTES if fits(layout) and dtype in (torch.float8_e4m3fn, torch.int8, *_COMPUTED) else 0


def applies(layout: HeadLayout, batch: AttentionBatch, q: Tensor, k_cache: Tensor) -> bool:
    """Whether this kernel computes such attention, and does so faster than `prefill`."""
    return (
        batch.max_query >= FROM_TOKENS
        and fits(layout)
        and (layout.window is None or batch.max_context <= layout.window)
        and q.dtype in _COMPUTED
        and (_is_direct(q, k_cache) or _heads_gathered(layout, batch, q, k_cache) > 0)
    )


def _is_direct(q: Tensor, k_cache: Tensor) -> bool:
    """Whether tiles can be copied from the cache as it is."""
    return k_cache.dtype == q.dtype and k_cache.shape[2] == BLOCK_SIZE


def _heads_gathered(layout: HeadLayout, batch: AttentionBatch, q: Tensor, k_cache: Tensor, fp8: bool = False) -> int:
    """How many heads are gathered at a time; 0: none are."""
    if k_cache.dtype == q.dtype:
        if batch.attended is None or batch.total_context is None:
            return 0
        if batch.attended < LEAST_REUSE * batch.total_context:
            return 0
    return heads_at_once(layout, batch, 1 if fp8 else q.element_size())


def prefill_attention(
    q: Tensor,
    layout: HeadLayout,
    batch: AttentionBatch,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
    fp8: bool = False,
) -> None:
    """Attention of every sequence after the first `num_decodes` into `out` [T, heads * head_dim]. `fp8`: the products
    over an FP8 cache are of FP8 too."""
    fp8 = fp8 and k_cache.dtype == torch.float8_e4m3fn
    heads = _heads_gathered(layout, batch, q, k_cache, fp8)
    if not heads:
        _launch(q, layout, batch, _boxes_of(k_cache, BLOCK_SIZE), _boxes_of(v_cache, BLOCK_SIZE), out)
        return
    room = make_room(layout, batch, k_cache.dtype if fp8 else q.dtype, heads)
    boxes = _boxes_of(room.k, GATHERED_ROWS), _boxes_of(room.v, GATHERED_ROWS)
    per_head = None if k_cache.dtype == torch.int8 else scales
    for first in range(0, layout.kv_heads, heads):
        some = min(heads, layout.kv_heads - first)
        gather(room, first, some, batch, k_cache, v_cache, scales)
        _launch(q, layout, batch, *boxes, out, room, first, some, per_head)


def _launch(
    q: Tensor,
    layout: HeadLayout,
    batch: AttentionBatch,
    k: TensorDescriptor,
    v: TensorDescriptor,
    out: Tensor,
    room: GatheredPrefix | None = None,
    first_head: int = 0,
    heads: int = 0,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    group = layout.heads // layout.kv_heads
    block_q = BLOCK_M // group
    sequences = batch.context_lens.shape[0] - batch.num_decodes
    tokens = q.shape[0] - batch.num_decodes
    tiles = tokens // block_q + sequences
    k_scale, v_scale = (q, q) if scales is None else scales
    total = batch.total_context
    few_before = batch.max_context < 2 * batch.max_query if total is None else total < 2 * tokens
    fp8 = room is not None and room.k.dtype.itemsize == 1
    launch(
        _hopper_prefill_kernel,
        (tiles * (layout.kv_heads if room is None else heads),),
        k,
        v,
        q,
        out,
        batch.rows,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables if room is None else room.bases,
        k_scale,
        v_scale,
        q.stride(0),
        batch.block_tables.stride(0),
        layout.scale,
        batch.num_decodes,
        sequences,
        tiles,
        int(few_before),
        first_head,
        heads,
        0 if room is None else room.k.shape[1],
        KV_HEADS=layout.kv_heads,
        GROUP=group,
        BLOCK_Q=block_q,
        STAGES=FP8_STAGES if fp8 else STAGES,
        GATHERED=room is not None,
        FP8=fp8,
        SCALED=scales is not None,
        num_warps=4,
        pdl=False,
        in_order=True,
    )


def _boxes_of(keys: Tensor, rows_at_once: int) -> TensorDescriptor:
    """Keys or values as TMA reads them: so many rows at a time, in boxes 128 bytes wide."""
    rows, size = keys.numel() // DIM, keys.element_size()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * size, rank=2)
    return TensorDescriptor(keys, [rows, DIM], [DIM, 1], [rows_at_once, BOX_BYTES // size], layout)
