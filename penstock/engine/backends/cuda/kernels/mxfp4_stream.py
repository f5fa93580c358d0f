"""The grouped product of `moe` on experts in MXFP4 with few tokens to an expert: weights go from memory to registers.

`mxfp4_fragments` has them in the order in which threads multiply them, so nothing passes through shared memory and no
warp waits for another. A warp holds the words of its next inputs while it multiplies those it has; rows of weights are
the tall side of the product, and the tokens of an expert the narrow one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.engine.backends.cuda.kernels.activation import gate_options, gated
from penstock.engine.backends.cuda.kernels.common import ceil_div, launch
from penstock.engine.backends.cuda.kernels.moe_plan import FewPairs, Plan
from penstock.engine.backends.cuda.kernels.mxfp4_fragments import Mxfp4Fragments
from penstock.engine.backends.interface import Activation

_gated = gluon.jit(gated.fn)


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """Shape of the launch."""

    tokens: int
    """Of a tile: 8, 16, 32 or 64."""
    rows: int
    """Tiles of 16 rows to a warp."""
    num_warps: int
    ahead: int
    """Steps of 64 inputs that are read before those ahead of them are multiplied: 1, 2, 4 or 8."""
    split: int = 1
    """Programs that share the inputs of a row; where the last program adds up the pairs, it adds up their parts too."""
    registers: int = 255
    """Of a thread, at most."""


# Of two words and one power: see `mxfp4_fragments._PLACES`. The power of step i of four is byte i of a word.
_UNPACK = """{
.reg .b32 m, u, v;
prmt.b32 m, $10, 0, 0x4%d4%d;
shl.b32 m, m, 7;
shl.b32 u, $8, 6;
and.b32 u, u, 0x81C081C0;
mul.bf16x2 $0, u, m;
shl.b32 u, $8, 2;
and.b32 u, u, 0x81C081C0;
mul.bf16x2 $1, u, m;
shf.l.wrap.b32 u, $8, $8, 12;
and.b32 u, u, 0x81C081C0;
mul.bf16x2 $2, u, m;
shl.b32 u, $9, 4;
and.b32 u, u, 0x81C081C0;
mul.bf16x2 $3, u, m;
and.b32 u, $9, 0x81C081C0;
mul.bf16x2 $4, u, m;
shf.l.wrap.b32 u, $9, $9, 10;
and.b32 u, u, 0x81C081C0;
mul.bf16x2 $5, u, m;
shl.b32 u, $8, 1;
and.b32 u, u, 0x81008100;
shr.b32 v, $9, 3;
lop3.b32 u, v, 0x00C000C0, u, 0xEA;
mul.bf16x2 $6, u, m;
and.b32 u, $8, 0x81008100;
shl.b32 v, $9, 6;
lop3.b32 u, v, 0x00C000C0, u, 0xEA;
mul.bf16x2 $7, u, m;
}"""


@constexpr_function
def _unpack_code(number: int) -> str:
    return _UNPACK % (number, number)


@constexpr_function
def _bits(count: int, first: int, rank: int, axis: int) -> list[list[int]]:
    """Bases of a linear layout along an axis: `first`, twice that, ..., below `first * count`."""
    bases = []
    step = first
    while step < first * count:
        bases.append([step if i == axis else 0 for i in range(rank)])
        step *= 2
    return bases


@constexpr_function
def _word_layout(warps: int, rows: int) -> gl.DistributedLinearLayout:
    """Of words [tiles of 16 rows, 8, 4, 4]."""
    return gl.DistributedLinearLayout(
        _bits(4, 1, 4, 3) + _bits(rows, warps, 4, 0),
        _bits(4, 1, 4, 2) + _bits(8, 1, 4, 1),
        _bits(warps, 1, 4, 0),
        [],
        [warps * rows, 8, 4, 4],
    )


@constexpr_function
def _half_layout(warps: int, rows: int) -> gl.DistributedLinearLayout:
    """The same with the last axis split into rows g and g + 8, and the two words of a row."""
    return gl.DistributedLinearLayout(
        _bits(2, 1, 5, 4) + _bits(2, 1, 5, 3) + _bits(rows, warps, 5, 0),
        _bits(4, 1, 5, 2) + _bits(8, 1, 5, 1),
        _bits(warps, 1, 5, 0),
        [],
        [warps * rows, 8, 4, 2, 2],
    )


@constexpr_function
def _token_layout(warps: int, tokens: int) -> gl.DistributedLinearLayout:
    """Of inputs [tokens, 64]: the same in every warp."""
    return gl.DistributedLinearLayout(
        _bits(16, 1, 2, 1) + _bits(tokens // 8, 8, 2, 0),
        _bits(4, 16, 2, 1) + _bits(8, 1, 2, 0),
        [[0, 0] for _ in _bits(warps, 1, 2, 0)],
        [],
        [tokens, 64],
    )


@gluon.jit
def _weights(
    words: gl.tensor,
    powers: gl.tensor,
    STEP: gl.constexpr,
    HALVES: gl.constexpr,
    OPERAND: gl.constexpr,
) -> gl.tensor:
    """Operand [rows, 64] of words [tiles, 8, 4, 4] and powers [tiles, 8, 4, 2] of four steps."""
    TILES: gl.constexpr = words.shape[0]
    split = gl.convert_layout(gl.reshape(words, [TILES, 8, 4, 2, 2]), HALVES, assert_trivial=True)
    p0, p1, p2, p3, p4, p5, p6, p7 = gl.inline_asm_elementwise(
        _unpack_code(STEP),
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
        [split, gl.expand_dims(powers, 4)],
        dtype=(
            gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
        ),
        is_pure=True,
        pack=2,
    )  # fmt: skip
    low = gl.join(gl.join(p0, p1), gl.join(p2, p3))
    high = gl.join(gl.join(p4, p5), gl.join(p6, p7))
    every = gl.join(low, high)  # tile, g, t, half, e, and the three bits of r, lowest first
    every = gl.permute(every, (0, 3, 1, 7, 6, 5, 2, 4))
    return gl.convert_layout(gl.reshape(every, [TILES * 16, 64]), OPERAND, assert_trivial=True)


@gluon.jit
def _inputs(x: gl.tensor, OPERAND: gl.constexpr) -> gl.tensor:
    """Operand [64, tokens] of inputs [tokens, 64], in the order of `_weights`."""
    TOKENS: gl.constexpr = x.shape[0]
    split = gl.permute(gl.reshape(x, [TOKENS, 4, 2, 2, 2, 2]), (2, 3, 4, 1, 5, 0))
    return gl.convert_layout(gl.reshape(split, [64, TOKENS]), OPERAND, assert_trivial=True)


@gluon.jit
def _load_inputs(rows: gl.tensor, k: gl.tensor, step: gl.tensor, K: gl.constexpr) -> gl.tensor:
    if K % 64 != 0:
        x = gl.load(rows + step * 64, mask=(step * 64 + k < K)[None, :], other=0.0)
    else:
        x = gl.load(rows + step * 64)
    return x


@gluon.jit(do_not_specialize=["tiles"])
def _stream_kernel(
    x_ptr: gl.tensor,
    words_ptr: gl.tensor,
    exponents_ptr: gl.tensor,
    scale_ptr: gl.tensor,
    bias_ptr: gl.tensor,
    out_ptr: gl.tensor,
    order_ptr: gl.tensor,
    starts_ptr: gl.tensor,
    route_ptr: gl.tensor,
    sums_ptr: gl.tensor,
    counter_ptr: gl.tensor,
    tiles: gl.tensor,
    N: gl.constexpr,
    K: gl.constexpr,
    EXPERTS: gl.constexpr,
    FEW: gl.constexpr,
    TOP_K: gl.constexpr,
    TOKENS: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
    AHEAD: gl.constexpr,
    SPLIT: gl.constexpr,
    PAIRED: gl.constexpr,
    GATED: gl.constexpr,
    WEIGHTED: gl.constexpr,
    GATE: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    BIASED: gl.constexpr,
    PDL: gl.constexpr,
) -> None:
    """`tiles`: of an expert's tokens that are computed beside each other; with FEW, pairs in all."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    WORDS: gl.constexpr = _word_layout(WARPS, ROWS)
    HALVES: gl.constexpr = _half_layout(WARPS, ROWS)
    POWERS: gl.constexpr = gl.SliceLayout(4, HALVES)
    INPUTS: gl.constexpr = _token_layout(WARPS, TOKENS)
    COLUMN: gl.constexpr = gl.SliceLayout(0, MMA)
    WIDE: gl.constexpr = 2 * N if GATED else N
    HEIGHT: gl.constexpr = WARPS * ROWS
    ROW_TILES: gl.constexpr = (WIDE // 2 + 7) // 8 if PAIRED else (WIDE + 15) // 16
    BLOCKS: gl.constexpr = (ROW_TILES + HEIGHT - 1) // HEIGHT
    STEPS: gl.constexpr = (K + 63) // 64
    SPANS: gl.constexpr = (STEPS + 3) // 4
    pid = gl.program_id(0)
    share = pid % SPLIT
    place = pid // SPLIT
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # The expert, and the tokens of the first tile: `pair` where it is stored or looked up, `m` where it lies in order.
    column = gl.arange(0, TOKENS, layout=COLUMN)
    column_x = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, INPUTS))
    if FEW:
        slot = place // BLOCKS
        block = place % BLOCKS
        expert = gl.minimum(gl.load(order_ptr + slot), EXPERTS - 1)
        here = 0
        leader = tiles
        for i in gl.static_range(TOP_K):
            seat = column * TOP_K + i
            chosen = gl.load(order_ptr + seat, mask=seat < tiles, other=-1)
            same = (seat < tiles) & (gl.minimum(chosen, EXPERTS - 1) == expert)
            here += gl.sum(same.to(gl.int32), axis=0)
            leader = gl.minimum(leader, gl.min(gl.where(same, seat, tiles), axis=0))
        present = leader == slot
        first = 0
        last = 1
        stride = TOKENS
    else:
        first = place % tiles
        block = place // tiles % BLOCKS
        expert = place // tiles // BLOCKS
        slot = expert
        here = 0
        last = gl.load(starts_ptr + expert + 1)
        first = gl.load(starts_ptr + expert) + first * TOKENS
        stride = tiles * TOKENS
        present = first < last
    if present:
        tile = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, WORDS))))
        g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, WORDS))))
        t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, WORDS))))
        w = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, WORDS))))
        # Tiles past the end read the last one: their sums are not stored.
        tile = gl.minimum(block * HEIGHT + tile, ROW_TILES - 1)
        words = (
            words_ptr + expert.to(gl.int64) * (ROW_TILES * STEPS * 128) + tile[:, None, None, None] * (STEPS * 128)
            + g[None, :, None, None] * 16 + t[None, None, :, None] * 4 + w[None, None, None, :]
        )  # fmt: skip
        tile_p = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, POWERS))))
        g_p = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, POWERS))))
        t_p = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, POWERS))))
        h_p = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, POWERS))))
        tile_p = gl.minimum(block * HEIGHT + tile_p, ROW_TILES - 1)
        powers = (
            exponents_ptr + expert.to(gl.int64) * (ROW_TILES * SPANS * 32) + tile_p[:, None, None, None] * (SPANS * 32)
            + g_p[None, :, None, None] * 4 + (t_p // 2)[None, None, :, None] * 2 + h_p[None, None, None, :]
        )  # fmt: skip
        k = gl.arange(0, 64, layout=gl.SliceLayout(0, INPUTS))
        ROUND: gl.constexpr = 8 if AHEAD == 8 else 4
        ROUNDS: gl.constexpr = STEPS // ROUND
        SHARE: gl.constexpr = (ROUNDS + SPLIT - 1) // SPLIT
        begin = gl.minimum(share * SHARE, ROUNDS)
        end = gl.minimum(begin + SHARE, ROUNDS)
        for start in range(first, last, stride):
            e = gl.load(powers + gl.minimum(begin * (ROUND // 4), SPANS - 1) * 32)
            ring = ()
            for i in gl.static_range(AHEAD):
                ring = ring + (gl.load(words + gl.minimum(begin * ROUND + i, STEPS - 1) * 128),)  # type: ignore[assignment]
            # Columns without a token read the row of one that has: they are not stored.
            if FEW:
                pair = column * 0 + slot
                in_m = column < 0
                m_x = column_x * 0 + slot
                for i in gl.static_range(TOP_K):
                    seat = column * TOP_K + i
                    chosen = gl.load(order_ptr + seat, mask=seat < tiles, other=-1)
                    same = (seat < tiles) & (gl.minimum(chosen, EXPERTS - 1) == expert)
                    pair = gl.where(same, seat, pair)
                    in_m = in_m | same
                    seat_x = column_x * TOP_K + i
                    chosen_x = gl.load(order_ptr + seat_x, mask=seat_x < tiles, other=-1)
                    m_x = gl.where((seat_x < tiles) & (gl.minimum(chosen_x, EXPERTS - 1) == expert), seat_x, m_x)
                m = pair
                source = m_x // TOP_K if GATED else m_x
            else:
                m = start + column
                in_m = m < last
                pair = gl.load(order_ptr + m, mask=in_m, other=0)
                m_x = gl.minimum(start + column_x, last - 1)
                source = gl.load(order_ptr + m_x) // TOP_K if GATED else m_x
            rows = x_ptr + source.to(gl.int64)[:, None] * K + k[None, :]
            acc = gl.zeros([HEIGHT * 16, TOKENS], gl.float32, layout=MMA)
            x = _load_inputs(rows, k, gl.minimum(begin * ROUND, STEPS - 1), K)
            for turn in range(begin, end):
                for i in gl.static_range(ROUND):
                    step = turn * ROUND + i
                    if i % 4 == 0:
                        # Of the four steps after these.
                        e_next = gl.load(powers + gl.minimum(step // 4 + 1, SPANS - 1) * 32)
                    taken = ring[i % AHEAD]  # type: ignore[var-annotated]
                    new = gl.load(words + gl.minimum(step + AHEAD, STEPS - 1) * 128)
                    ring = ring[: i % AHEAD] + (new,) + ring[i % AHEAD + 1 :]
                    x_next = _load_inputs(rows, k, gl.minimum(step + 1, STEPS - 1), K)
                    acc = mma_v2(_weights(taken, e, i % 4, HALVES, A), _inputs(x, B), acc)
                    x = x_next
                    if i % 4 == 3:
                        e = e_next
            if STEPS % ROUND != 0:  # noqa: SIM102 - known when compiled; the other is not
                if share == SPLIT - 1:
                    # What is left of the inputs; the first of it has been read.
                    for i in gl.static_range(STEPS % ROUND):
                        step = ROUNDS * ROUND + i
                        if i == 4:
                            e = gl.load(powers + step // 4 * 32)
                        taken = ring[i % AHEAD]
                        if i + AHEAD < STEPS % ROUND:
                            new = gl.load(words + (step + AHEAD) * 128)
                            ring = ring[: i % AHEAD] + (new,) + ring[i % AHEAD + 1 :]
                        acc = mma_v2(_weights(taken, e, i % 4, HALVES, A), _inputs(x, B), acc)
                        if i + 1 < STEPS % ROUND:
                            x = _load_inputs(rows, k, step + 1, K)
            row = gl.arange(0, HEIGHT * 16, layout=gl.SliceLayout(1, MMA)) + block * (HEIGHT * 16)
            in_row = row < WIDE
            if PAIRED:
                within = row // 16 * 8 + row % 8
                in_row = within < WIDE // 2
                row = gl.minimum(within, WIDE // 2 - 1) + row // 8 % 2 * (WIDE // 2)
            row = gl.minimum(row, WIDE - 1)
            acc *= gl.load(scale_ptr + expert * WIDE + row)[:, None]
            if BIASED:
                bias = gl.load(bias_ptr + expert * WIDE + row).to(gl.float32)
                acc += gl.where(share == 0, bias, 0.0)[:, None]
            if GATED:
                both = gl.permute(gl.reshape(acc, [HEIGHT, 2, 8, TOKENS]), (0, 2, 3, 1))
                gate, up = gl.split(both)
                y = gl.reshape(_gated(gate, up, GATE, ALPHA, LIMIT), [HEIGHT * 8, TOKENS])
                n = gl.arange(0, HEIGHT * 8, layout=gl.SliceLayout(1, y.type.layout)) + block * (HEIGHT * 8)
                m_y = gl.convert_layout(m, gl.SliceLayout(0, y.type.layout)).to(gl.int64)
                in_y = gl.convert_layout(in_m, gl.SliceLayout(0, y.type.layout))[None, :] & (n < N)[:, None]
                gl.store(out_ptr + m_y[None, :] * N + n[:, None], y.to(out_ptr.dtype.element_ty), mask=in_y)
            else:
                if WEIGHTED:
                    acc *= gl.load(route_ptr + pair, mask=in_m, other=0.0)[None, :]
                stored = in_m[None, :] & in_row[:, None]
                if FEW:
                    gl.store(sums_ptr + (pair * SPLIT + share)[None, :] * N + row[:, None], acc, mask=stored)
                else:
                    target = out_ptr + pair.to(gl.int64)[None, :] * N + row[:, None]
                    gl.store(target, acc.to(out_ptr.dtype.element_ty), mask=stored)
        if FEW and not GATED:
            # All threads' stores happen before the barrier, and thread 0's release makes them visible to the chip.
            gl.thread_barrier()
            arrived = gl.atomic_add(counter_ptr + block, here, sem="acq_rel", scope="gpu")
            if arrived + here == tiles * SPLIT:
                gl.store(counter_ptr + block, 0)
                row = gl.arange(0, HEIGHT * 16, layout=gl.SliceLayout(1, MMA)) + block * (HEIGHT * 16)
                mask = (column * TOP_K < tiles)[None, :] & (row < N)[:, None]
                total = gl.zeros([HEIGHT * 16, TOKENS], gl.float32, layout=MMA)
                for i in gl.static_range(TOP_K * SPLIT):
                    at = sums_ptr + (column * (TOP_K * SPLIT) + i)[None, :] * N + row[:, None]
                    total += gl.load(at, mask=mask, other=0.0)
                at = out_ptr + column[None, :] * N + row[:, None]
                gl.store(at, total.to(out_ptr.dtype.element_ty), mask=mask)


def grouped_linear(
    x: Tensor,
    stack: Mxfp4Fragments,
    bias: Tensor | None,
    schedule: Plan | FewPairs,
    top_k: int,
    *,
    gated: bool,
    route_weights: Tensor | None = None,
    activation: Activation = "silu",
    counters: Tensor | None = None,
    config: StreamConfig,
    pdl: bool = False,
) -> Tensor:
    """As `moe.grouped_linear`. Weights of a gated product are `paired`, and route weights meet its outputs alone."""
    experts, outputs = stack.scale.shape
    n, pairs = outputs // 2 if gated else outputs, schedule.pairs
    few = isinstance(schedule, FewPairs)
    assert stack.paired or not gated
    assert not gated or route_weights is None
    summed = few and not gated
    out = torch.empty((pairs // top_k if summed else pairs, n), dtype=x.dtype, device=x.device)
    if pairs == 0:
        return out
    split = config.split if summed else 1
    height = config.num_warps * config.rows
    blocks = ceil_div(stack.words.shape[1], height)
    # Experts with more tokens than an equal share go through several tiles one after the other.
    tiles = pairs if few else max(1, ceil_div(pairs, experts * config.tokens))
    launch(
        _stream_kernel,
        ((pairs if few else experts * tiles) * blocks * split,),
        x,
        *stack.tensors,
        x if bias is None else bias,
        out,
        *schedule.pointers,
        x if route_weights is None else route_weights,
        torch.empty((pairs * split, n), dtype=torch.float32, device=x.device) if summed else x,
        x if counters is None else counters,
        tiles,
        N=n,
        K=x.shape[1],
        EXPERTS=experts,
        FEW=few,
        TOP_K=top_k,
        TOKENS=config.tokens,
        ROWS=config.rows,
        WARPS=config.num_warps,
        AHEAD=config.ahead,
        SPLIT=split,
        PAIRED=stack.paired,
        GATED=gated,
        WEIGHTED=route_weights is not None,
        **gate_options(activation),
        BIASED=bias is not None,
        num_warps=config.num_warps,
        maxnreg=config.registers,
        pdl=pdl,
    )
    return out
