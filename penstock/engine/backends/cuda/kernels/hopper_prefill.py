"""Attention of long chunks on Hopper: bulk copies and tensor cores kept busy by specialised warps.

The job of `prefill` for head dimension 128 and a 16-bit cache, written in Gluon. A program owns `BLOCK_M` rows
(consecutive tokens times the query heads of one KV head) in two warpgroups of 64 rows. A producer warp fetches key and
value tiles with TMA, one 16-token cache block per copy, into a ring of `STAGES` shared-memory tiles; each consumer
warpgroup multiplies the next keys while it still accumulates the last values, so its softmax runs beside its own
products and beside the other warpgroup's. Exponentials stay in float32 until they are multiplied, and each thread sums
its own part of a row, so that nothing is exchanged or packed between a product and the next.

Tiles run from the diagonal down to key 0: only the first ones need a mask. Slots past the end of a sequence may hold
anything, NaN included: scores there are masked, and the rows of the value tile are cleared before they are multiplied.

A quantized cache is gathered first (`gathered_prefix`), some heads at a time: then tiles are contiguous, each two
copies instead of sixteen.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
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
from penstock.engine.backends.interface import AttentionBatch, HeadLayout

DIM = 128
BLOCK_SIZE = 16
BLOCK_M = 128
BLOCK_N = 128
STAGES = 2
FROM_TOKENS = 512
"""Longest chunk of a step from which this kernel is faster than `prefill` (measured on an H200)."""
BOX = 64
"""Numbers in one row of a TMA box: 128 bytes, the width of the swizzle."""
_LEAST_PEAK = gl.constexpr(-1.0e30)
"""Of rows that see no key of their first tile: a number, so that what they add up to there is zero, not NaN."""
_MASKED = gl.constexpr(float("-inf"))
"""A number will not do: `x * factor - peak`, contracted into one multiply-add, is not zero for a row of nothing but
masked scores, but the rounding error of `x * factor`, and its exponential may be infinite."""
_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _copy_tile(
    desc: tma.tensor_descriptor,
    block_ids: gl.tuple,
    kv_head: gl.tensor,
    KV_HEADS: gl.constexpr,
    bar: gl.shared_memory_descriptor,
    boxes: gl.shared_memory_descriptor,
    first: gl.tensor,
) -> None:
    """Issue the copies of one tile: eight cache blocks, each in two boxes of 64 columns."""
    for j in gl.static_range(8):
        row = (block_ids[j] * KV_HEADS + kv_head) * 16
        tma.async_copy_global_to_shared(desc, [row, 0], bar, boxes.index(first + j))
        tma.async_copy_global_to_shared(desc, [row, 64], bar, boxes.index(first + 8 + j))


@gluon.jit
def _producer(
    k_desc: tma.tensor_descriptor,
    v_desc: tma.tensor_descriptor,
    k_boxes: gl.shared_memory_descriptor,
    v_boxes: gl.shared_memory_descriptor,
    k_ready: gl.shared_memory_descriptor,
    k_free: gl.shared_memory_descriptor,
    v_ready: gl.shared_memory_descriptor,
    v_free: gl.shared_memory_descriptor,
    table: gl.tensor,
    last_block: gl.tensor,
    tiles: gl.tensor,
    kv_head: gl.tensor,
    KV_HEADS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Tiles of a paged cache."""
    TILE_BYTES: gl.constexpr = 128 * 128 * 2
    for i in range(tiles):
        at = (tiles - 1 - i) * 8
        b0 = gl.load(table + gl.minimum(at, last_block))
        b1 = gl.load(table + gl.minimum(at + 1, last_block))
        b2 = gl.load(table + gl.minimum(at + 2, last_block))
        b3 = gl.load(table + gl.minimum(at + 3, last_block))
        b4 = gl.load(table + gl.minimum(at + 4, last_block))
        b5 = gl.load(table + gl.minimum(at + 5, last_block))
        b6 = gl.load(table + gl.minimum(at + 6, last_block))
        b7 = gl.load(table + gl.minimum(at + 7, last_block))
        block_ids = (b0, b1, b2, b3, b4, b5, b6, b7)
        stage = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_ready.index(stage), TILE_BYTES)
        _copy_tile(k_desc, block_ids, kv_head, KV_HEADS, k_ready.index(stage), k_boxes, stage * 16)
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_ready.index(stage), TILE_BYTES)
        _copy_tile(v_desc, block_ids, kv_head, KV_HEADS, v_ready.index(stage), v_boxes, stage * 16)


@gluon.jit
def _contiguous_producer(
    k_desc: tma.tensor_descriptor,
    v_desc: tma.tensor_descriptor,
    k_boxes: gl.shared_memory_descriptor,
    v_boxes: gl.shared_memory_descriptor,
    k_ready: gl.shared_memory_descriptor,
    k_free: gl.shared_memory_descriptor,
    v_ready: gl.shared_memory_descriptor,
    v_free: gl.shared_memory_descriptor,
    first_row: gl.tensor,
    tiles: gl.tensor,
    STAGES: gl.constexpr,
) -> None:
    """Tiles of gathered keys and values, each in two boxes of 64 columns."""
    TILE_BYTES: gl.constexpr = 128 * 128 * 2
    for i in range(tiles):
        row = first_row + (tiles - 1 - i) * 128
        stage = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_ready.index(stage), TILE_BYTES)
        tma.async_copy_global_to_shared(k_desc, [row, 0], k_ready.index(stage), k_boxes.index(stage * 2))
        tma.async_copy_global_to_shared(k_desc, [row, 64], k_ready.index(stage), k_boxes.index(stage * 2 + 1))
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_ready.index(stage), TILE_BYTES)
        tma.async_copy_global_to_shared(v_desc, [row, 0], v_ready.index(stage), v_boxes.index(stage * 2))
        tma.async_copy_global_to_shared(v_desc, [row, 64], v_ready.index(stage), v_boxes.index(stage * 2 + 1))


@gluon.jit
def _scores(
    q_tile: gl.shared_memory_descriptor,
    k_tile: gl.shared_memory_descriptor,
    S_LAYOUT: gl.constexpr,
) -> gl.tensor:
    zeros = gl.zeros([64, 128], gl.float32, layout=S_LAYOUT)
    return warpgroup_mma(q_tile, k_tile.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def _mask(
    s: gl.tensor,
    position: gl.tensor,
    start: gl.tensor,
    S_LAYOUT: gl.constexpr,
) -> gl.tensor:
    n = start + gl.arange(0, 128, layout=gl.SliceLayout(0, S_LAYOUT))
    return gl.where(n[None, :] <= position[:, None], s, _MASKED)


@gluon.jit
def _partial_sums(e: gl.tensor) -> gl.tensor:
    """Sums of those numbers of each row that one thread holds: [64, 4], without an exchange between threads."""
    return gl.sum(gl.sum(gl.reshape(e, [64, 16, 4, 2]), 3), 1)


@gluon.jit
def _ahead_of_wait(sums: gl.tensor) -> gl.tensor:
    """Keeps the exponentials that `sums` is made of ahead of the wait that follows.

    ptxas would move them behind it, where they run beside no product of this warpgroup. The store never happens, since
    no sum of exponentials is negative; a branch would make ptxas serialize the products.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred never; .reg .b32 at; mov.b32 at, 0; setp.lt.f32 never, $1, 0f00000000; "
        "@never st.shared.f32 [at], $1; mov.b32 $0, $1; }",
        "=f,f",
        [sums],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _steps(
    begin: gl.tensor,
    end: gl.tensor,
    tiles: gl.tensor,
    o: gl.tensor,
    e: gl.tensor,
    peak: gl.tensor,
    total: gl.tensor,
    q_tile: gl.shared_memory_descriptor,
    position: gl.tensor,
    factor: gl.tensor,
    k_tiles: gl.shared_memory_descriptor,
    v_tiles: gl.shared_memory_descriptor,
    k_ready: gl.shared_memory_descriptor,
    k_free: gl.shared_memory_descriptor,
    v_ready: gl.shared_memory_descriptor,
    v_free: gl.shared_memory_descriptor,
    S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr,
    P_LAYOUT: gl.constexpr,
    STAGES: gl.constexpr,
    MASKED: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Tiles `begin..end` in the order of the ring; on entry `e` holds the exponentials of tile `begin - 1`."""
    for i in range(begin, end):
        stage = i % STAGES
        mbarrier.wait(k_ready.index(stage), (i // STAGES) & 1)
        s_next = _scores(q_tile, k_tiles.index(stage), S_LAYOUT)
        before = (i - 1) % STAGES
        mbarrier.wait(v_ready.index(before), ((i - 1) // STAGES) & 1)
        p = gl.convert_layout(e.to(v_tiles.dtype), P_LAYOUT)
        o_next = warpgroup_mma(p, v_tiles.index(before), o, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=1, deps=[s_next])
        mbarrier.arrive(k_free.index(stage), count=1)
        if MASKED:
            s = _mask(s, position, (tiles - 1 - i) * 128, S_LAYOUT)
        new_peak = gl.maximum(peak, gl.max(s, 1) * factor)
        e = gl.exp2(s * factor - new_peak[:, None])
        decay = gl.exp2(peak - new_peak)
        sums = _partial_sums(e)
        total = _ahead_of_wait(total * gl.convert_layout(decay, gl.SliceLayout(1, sums.type.layout))[:, None] + sums)
        peak = new_peak
        o = warpgroup_mma_wait(num_outstanding=0, deps=[o_next])
        mbarrier.arrive(v_free.index(before), count=1)
        o = o * gl.convert_layout(decay, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return o, e, peak, total


@gluon.jit
def _consumer(
    WHICH: gl.constexpr,
    q_tiles: gl.shared_memory_descriptor,
    k_tiles: gl.shared_memory_descriptor,
    v_tiles: gl.shared_memory_descriptor,
    k_ready: gl.shared_memory_descriptor,
    k_free: gl.shared_memory_descriptor,
    v_ready: gl.shared_memory_descriptor,
    v_free: gl.shared_memory_descriptor,
    out_ptr: gl.tensor,
    out_base: gl.tensor,
    offset: gl.tensor,
    length: gl.tensor,
    context: gl.tensor,
    past: gl.tensor,
    tiles: gl.tensor,
    masked: gl.tensor,
    kv_head: gl.tensor,
    scale: gl.tensor,
    v_scale_ptr: gl.tensor,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    STAGES: gl.constexpr,
    SCALED: gl.constexpr,
) -> None:
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    O_LAYOUT: gl.constexpr = S_LAYOUT
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    V_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    m = WHICH * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    token = offset + m // GROUP
    position = past + token
    factor = scale * _LOG2E
    q_tile = q_tiles.index(WHICH)

    mbarrier.wait(k_ready.index(0), 0)
    s_first = _scores(q_tile, k_tiles.index(0), S_LAYOUT)
    s = warpgroup_mma_wait(num_outstanding=0, deps=[s_first])
    mbarrier.arrive(k_free.index(0), count=1)
    s = _mask(s, position, (tiles - 1) * 128, S_LAYOUT)
    peak = gl.maximum(gl.max(s, 1) * factor, _LEAST_PEAK)
    e = gl.exp2(s * factor - peak[:, None])
    total = _partial_sums(e)
    if tiles * 128 > context:
        mbarrier.wait(v_ready.index(0), 0)
        rows = (tiles - 1) * 128 + gl.arange(0, 128, layout=gl.SliceLayout(1, V_LAYOUT))
        v_tile = v_tiles.index(0)
        v = v_tile.load(V_LAYOUT)
        v_tile.store(gl.where(rows[:, None] < context, v, gl.zeros([128, 128], v.dtype, layout=V_LAYOUT)))
        fence_async_shared()
    o = gl.zeros([64, 128], gl.float32, layout=O_LAYOUT)
    o, e, peak, total = _steps(
        1, masked, tiles, o, e, peak, total, q_tile, position, factor,
        k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, S_LAYOUT, O_LAYOUT, P_LAYOUT, STAGES, True,
    )  # fmt: skip
    o, e, peak, total = _steps(
        masked, tiles, tiles, o, e, peak, total, q_tile, position, factor,
        k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, S_LAYOUT, O_LAYOUT, P_LAYOUT, STAGES, False,
    )  # fmt: skip
    last = (tiles - 1) % STAGES
    mbarrier.wait(v_ready.index(last), ((tiles - 1) // STAGES) & 1)
    p = gl.convert_layout(e.to(v_tiles.dtype), P_LAYOUT)
    o_last = warpgroup_mma(p, v_tiles.index(last), o, is_async=True)
    o = warpgroup_mma_wait(num_outstanding=0, deps=[o_last])
    if SCALED:
        share = gl.load(v_scale_ptr + kv_head) / gl.sum(total, 1)
    else:
        share = 1.0 / gl.sum(total, 1)
    o = o * gl.convert_layout(share, gl.SliceLayout(1, O_LAYOUT))[:, None]
    d = gl.arange(0, 128, layout=gl.SliceLayout(0, O_LAYOUT))
    rows = WHICH * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, O_LAYOUT))
    tokens = offset + rows // GROUP
    column = (kv_head * GROUP + rows % GROUP) * 128
    target = out_ptr + ((out_base + tokens).to(gl.int64) * (KV_HEADS * GROUP * 128) + column)[:, None] + d[None, :]
    written = (rows // GROUP < BLOCK_Q) & (tokens < length)
    gl.store(target, o.to(out_ptr.dtype.element_ty), mask=written[:, None])


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
    SCALED: gl.constexpr,
    PDL: gl.constexpr,
) -> None:
    """`GATHERED`: over `num_heads` heads from `first_head` on, whose keys lie `gathered_rows` from each other, and
    `table_ptr` is where sequences begin. `SCALED`: keys and values of a head have one scale. `PDL` is always false: it
    waits for its predecessors in the ordinary way."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    dtype: gl.constexpr = q_ptr.dtype.element_ty
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

        q_tiles = gl.allocate_shared_memory(dtype, [2, 64, 128], TILE)
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
            q_tiles.index(half).store(gl.load(q_ptr + at, mask=present[:, None], other=0.0))
        fence_async_shared()
        if GATHERED:
            first_row = here * gathered_rows + gl.load(table_ptr + index)
            gl.warp_specialize(
                [
                    (
                        _consumer,
                        (0, q_tiles, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, out_ptr, begin, offset, length,
                         context, past, tiles, masked, kv_head, scale, v_scale_ptr, KV_HEADS, GROUP, BLOCK_Q, STAGES,
                         SCALED),
                    ),
                    (
                        _consumer,
                        (1, q_tiles, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, out_ptr, begin, offset, length,
                         context, past, tiles, masked, kv_head, scale, v_scale_ptr, KV_HEADS, GROUP, BLOCK_Q, STAGES,
                         SCALED),
                    ),
                    (
                        _contiguous_producer,
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
                        _consumer,
                        (0, q_tiles, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, out_ptr, begin, offset, length,
                         context, past, tiles, masked, kv_head, scale, v_scale_ptr, KV_HEADS, GROUP, BLOCK_Q, STAGES,
                         SCALED),
                    ),
                    (
                        _consumer,
                        (1, q_tiles, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, out_ptr, begin, offset, length,
                         context, past, tiles, masked, kv_head, scale, v_scale_ptr, KV_HEADS, GROUP, BLOCK_Q, STAGES,
                         SCALED),
                    ),
                    (
                        _producer,
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
    return MOST_BYTES if fits(layout) and dtype in (torch.float8_e4m3fn, torch.int8) else 0


def applies(layout: HeadLayout, batch: AttentionBatch, q: Tensor, k_cache: Tensor) -> bool:
    """Whether this kernel computes such attention, and does so faster than `prefill`."""
    return (
        batch.max_query >= FROM_TOKENS
        and fits(layout)
        and (layout.window is None or batch.max_context <= layout.window)
        and q.dtype in (torch.bfloat16, torch.float16)
        and (_is_direct(q, k_cache) if k_cache.dtype == q.dtype else heads_at_once(layout, batch, q.element_size()) > 0)
    )


def _is_direct(q: Tensor, k_cache: Tensor) -> bool:
    """Whether tiles are copied from the cache as it is."""
    return k_cache.dtype == q.dtype and k_cache.shape[2] == BLOCK_SIZE


def prefill_attention(
    q: Tensor,
    layout: HeadLayout,
    batch: AttentionBatch,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Attention of every sequence after the first `num_decodes` into `out` [T, heads * head_dim]."""
    if _is_direct(q, k_cache):
        _launch(q, layout, batch, _boxes_of(k_cache, BLOCK_SIZE), _boxes_of(v_cache, BLOCK_SIZE), out)
        return
    heads = heads_at_once(layout, batch, q.element_size())
    room = make_room(layout, batch, q.dtype, heads)
    per_head = None if k_cache.dtype == torch.int8 else scales
    for first in range(0, layout.kv_heads, heads):
        some = min(heads, layout.kv_heads - first)
        gather(room, first, some, batch, k_cache, v_cache, scales)
        boxes = _boxes_of(room.k, GATHERED_ROWS), _boxes_of(room.v, GATHERED_ROWS)
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
        STAGES=STAGES,
        GATHERED=room is not None,
        SCALED=scales is not None,
        num_warps=4,
        pdl=False,
        in_order=True,
    )


def _boxes_of(keys: Tensor, rows_at_once: int) -> TensorDescriptor:
    """Keys or values as TMA reads them: so many rows at a time, in two boxes of 64 columns."""
    rows = keys.numel() // DIM
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(keys, [rows, DIM], [DIM, 1], [rows_at_once, BOX], layout)
