"""What a warpgroup of `hopper_prefill` does with the tiles: 64 rows of scores, their softmax, and sums of values.

It multiplies the next keys while it still accumulates the last values, so its softmax runs beside its own products.
Exponentials stay in float32 until they are multiplied, and each thread sums its own part of a row, so that nothing is
exchanged or packed between a product and the next.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LEAST_PEAK = gl.constexpr(-1.0e30)
"""Of rows that see no key of their first tile: a number, so that what they add up to there is zero, not NaN."""
_MASKED = gl.constexpr(float("-inf"))
"""A number will not do: `x * factor - peak`, contracted into one multiply-add, is not zero for a row of nothing but
masked scores, but the rounding error of `x * factor`, and its exponential may be infinite."""
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _scores(
    q_tile: gl.shared_memory_descriptor,
    k_tile: gl.shared_memory_descriptor,
    S_LAYOUT: gl.constexpr,
) -> gl.tensor:
    zeros = gl.zeros([64, 128], gl.float32, layout=S_LAYOUT)
    return warpgroup_mma(q_tile, k_tile.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def mask(
    s: gl.tensor,
    position: gl.tensor,
    start: gl.tensor,
    S_LAYOUT: gl.constexpr,
) -> gl.tensor:
    n = start + gl.arange(0, 128, layout=gl.SliceLayout(0, S_LAYOUT))
    return gl.where(n[None, :] <= position[:, None], s, _MASKED)


@gluon.jit
def partial_sums(e: gl.tensor) -> gl.tensor:
    """Sums of those numbers of each row that one thread holds: [64, 4], without an exchange between threads."""
    return gl.sum(gl.sum(gl.reshape(e, [64, 16, 4, 2]), 3), 1)


@gluon.jit
def ahead_of_wait(sums: gl.tensor) -> gl.tensor:
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
def write_rows(
    o: gl.tensor,
    total: gl.tensor,
    WHICH: gl.constexpr,
    out_ptr: gl.tensor,
    out_base: gl.tensor,
    offset: gl.tensor,
    length: gl.tensor,
    kv_head: gl.tensor,
    v_scale_ptr: gl.tensor,
    O_LAYOUT: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    SCALED: gl.constexpr,
) -> None:
    """Sums of values over those of exponentials, of the rows that are tokens."""
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
            s = mask(s, position, (tiles - 1 - i) * 128, S_LAYOUT)
        new_peak = gl.maximum(peak, gl.max(s, 1) * factor)
        e = gl.exp2(s * factor - new_peak[:, None])
        decay = gl.exp2(peak - new_peak)
        sums = partial_sums(e)
        total = ahead_of_wait(total * gl.convert_layout(decay, gl.SliceLayout(1, sums.type.layout))[:, None] + sums)
        peak = new_peak
        o = warpgroup_mma_wait(num_outstanding=0, deps=[o_next])
        mbarrier.arrive(v_free.index(before), count=1)
        o = o * gl.convert_layout(decay, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return o, e, peak, total


@gluon.jit
def consumer(
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
    factor = scale * LOG2E
    q_tile = q_tiles.index(WHICH)

    mbarrier.wait(k_ready.index(0), 0)
    s_first = _scores(q_tile, k_tiles.index(0), S_LAYOUT)
    s = warpgroup_mma_wait(num_outstanding=0, deps=[s_first])
    mbarrier.arrive(k_free.index(0), count=1)
    s = mask(s, position, (tiles - 1) * 128, S_LAYOUT)
    peak = gl.maximum(gl.max(s, 1) * factor, LEAST_PEAK)
    e = gl.exp2(s * factor - peak[:, None])
    total = partial_sums(e)
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
    write_rows(
        o, total, WHICH, out_ptr, out_base, offset, length, kv_head, v_scale_ptr, O_LAYOUT, KV_HEADS, GROUP, BLOCK_Q,
        SCALED,
    )  # fmt: skip
