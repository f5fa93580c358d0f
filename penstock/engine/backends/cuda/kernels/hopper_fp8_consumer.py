"""What a warpgroup of `hopper_prefill` does with tiles of FP8: as `hopper_consumer`, with both products in FP8.

Queries have a scale for each row; probabilities are multiplied by 256 before they are rounded, so that few of them lie
below what FP8 can hold. Tensor cores add FP8 products up with some 14 bits. Of a few tiles that is enough, of a whole
context it is not: every `_TILES_IN_ACCUMULATOR` tiles their sums are added to float32 numbers in shared memory.

Values come transposed, and the tokens of a tile in the order in which a thread holds its probabilities
(`gathered_prefix`): nothing moves between threads from one product to the next.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from penstock.engine.backends.cuda.kernels.hopper_consumer import (
    LEAST_PEAK,
    LOG2E,
    ahead_of_wait,
    mask,
    partial_sums,
    write_rows,
)

_TILES_IN_ACCUMULATOR = gl.constexpr(16)
_HEADROOM = gl.constexpr(8.0)
"""Probabilities are at most two to this power, of the 448 that FP8 can hold."""


@gluon.jit
def _scores(
    q_tile: gl.shared_memory_descriptor,
    k_tile: gl.shared_memory_descriptor,
    S_LAYOUT: gl.constexpr,
) -> gl.tensor:
    zeros = gl.zeros([64, 128], gl.float32, layout=S_LAYOUT)
    return warpgroup_mma(q_tile, k_tile.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def _with_values(
    e: gl.tensor,
    v_tile: gl.shared_memory_descriptor,
    o: gl.tensor,
    P_LAYOUT: gl.constexpr,
) -> gl.tensor:
    """`o` and the values of one tile. A thread holds the columns 8 j + 2 t and the one behind it of a product, for all
    j, and multiplies four columns behind one another: those of two j, which is the order of the tile's tokens."""
    p = gl.reshape(e.to(gl.float8e4nv), [64, 8, 2, 4, 2])
    p = gl.reshape(gl.permute(p, [0, 1, 3, 2, 4]), [64, 128])
    return warpgroup_mma(gl.convert_layout(p, P_LAYOUT), v_tile.permute([1, 0]), o, is_async=True)


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
        o_next = _with_values(e, v_tiles.index(before), o, P_LAYOUT)
        s = warpgroup_mma_wait(num_outstanding=1, deps=[s_next])
        mbarrier.arrive(k_free.index(stage), count=1)
        if MASKED:
            s = mask(s, position, (tiles - 1 - i) * 128, S_LAYOUT)
        new_peak = gl.maximum(peak, gl.max(s, 1) * factor - _HEADROOM)
        e = gl.exp2(s * factor[:, None] - new_peak[:, None])
        decay = gl.exp2(peak - new_peak)
        sums = partial_sums(e)
        total = ahead_of_wait(total * gl.convert_layout(decay, gl.SliceLayout(1, sums.type.layout))[:, None] + sums)
        peak = new_peak
        o = warpgroup_mma_wait(num_outstanding=0, deps=[o_next])
        mbarrier.arrive(v_free.index(before), count=1)
        o = o * gl.convert_layout(decay, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return o, e, peak, total


@gluon.jit
def _by_thread(o: gl.tensor) -> gl.tensor:
    """[64, 128] with what the threads of a warp hold side by side, so that they write to different banks."""
    o = gl.permute(gl.reshape(o, [4, 2, 8, 16, 4, 2]), [1, 3, 0, 2, 4, 5])
    return gl.reshape(o, [32, 256])


@gluon.jit
def _by_row(o: gl.tensor, O_LAYOUT: gl.constexpr) -> gl.tensor:
    o = gl.permute(gl.reshape(o, [2, 16, 4, 8, 4, 2]), [2, 0, 3, 1, 4, 5])
    return gl.convert_layout(gl.reshape(o, [64, 128]), O_LAYOUT)


@gluon.jit
def _added(
    o: gl.tensor,
    kept: gl.shared_memory_descriptor,
    decay: gl.tensor,
    O_LAYOUT: gl.constexpr,
) -> gl.tensor:
    """`o` and the sums `kept` of tiles before, which `decay` makes relative to the peaks of `o`."""
    rows = _by_row(kept.load(_by_thread(o).type.layout), O_LAYOUT)
    return o + rows * gl.convert_layout(decay, gl.SliceLayout(1, O_LAYOUT))[:, None]


@gluon.jit
def fp8_consumer(
    WHICH: gl.constexpr,
    q_tiles: gl.shared_memory_descriptor,
    q_scales: gl.shared_memory_descriptor,
    o_tiles: gl.shared_memory_descriptor,
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
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    O_LAYOUT: gl.constexpr = S_LAYOUT
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4)
    m = WHICH * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    position = past + offset + m // GROUP
    factor = q_scales.index(WHICH).load(gl.SliceLayout(1, S_LAYOUT)) * (scale * LOG2E)
    q_tile = q_tiles.index(WHICH)

    mbarrier.wait(k_ready.index(0), 0)
    s_first = _scores(q_tile, k_tiles.index(0), S_LAYOUT)
    s = warpgroup_mma_wait(num_outstanding=0, deps=[s_first])
    mbarrier.arrive(k_free.index(0), count=1)
    s = mask(s, position, (tiles - 1) * 128, S_LAYOUT)
    peak = gl.maximum(gl.max(s, 1) * factor - _HEADROOM, LEAST_PEAK)
    e = gl.exp2(s * factor[:, None] - peak[:, None])
    total = partial_sums(e)
    o = gl.zeros([64, 128], gl.float32, layout=O_LAYOUT)
    o, e, peak, total = _steps(
        1, masked, tiles, o, e, peak, total, q_tile, position, factor,
        k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, S_LAYOUT, O_LAYOUT, P_LAYOUT, STAGES, True,
    )  # fmt: skip
    kept = o_tiles.index(WHICH)
    # Not `peak`, which it becomes: Triton carries a name through a loop only if its value is another one than before.
    kept_peak = gl.full([64], LEAST_PEAK, gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    for begin in range(masked, tiles, _TILES_IN_ACCUMULATOR):
        if begin > masked:
            o = _added(o, kept, gl.exp2(kept_peak - peak), O_LAYOUT)
        kept.store(_by_thread(o))
        kept_peak = peak
        o, e, peak, total = _steps(
            begin, gl.minimum(begin + _TILES_IN_ACCUMULATOR, tiles), tiles,
            gl.zeros([64, 128], gl.float32, layout=O_LAYOUT), e, peak, total, q_tile, position, factor,
            k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, S_LAYOUT, O_LAYOUT, P_LAYOUT, STAGES, False,
        )  # fmt: skip
    last = (tiles - 1) % STAGES
    mbarrier.wait(v_ready.index(last), ((tiles - 1) // STAGES) & 1)
    o_last = _with_values(e, v_tiles.index(last), o, P_LAYOUT)
    o = warpgroup_mma_wait(num_outstanding=0, deps=[o_last])
    if tiles > masked:
        o = _added(o, kept, gl.exp2(kept_peak - peak), O_LAYOUT)
    write_rows(
        o, total, WHICH, out_ptr, out_base, offset, length, kv_head, v_scale_ptr, O_LAYOUT, KV_HEADS, GROUP, BLOCK_Q,
        SCALED,
    )  # fmt: skip
