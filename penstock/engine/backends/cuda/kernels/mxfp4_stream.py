"""The grouped product of `moe` on experts in MXFP4 with few tokens to an expert: weights go from memory to registers.

`mxfp4_fragments` has them in the order in which threads multiply them, so nothing passes through shared memory and no
warp waits for another. A warp holds the words of its next inputs while it multiplies those it has; rows of weights are
the tall side of the product, and the tokens of an expert the narrow one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.engine.backends.cuda.kernels.activation import gate_options
from penstock.engine.backends.cuda.kernels.common import ceil_div, launch
from penstock.engine.backends.cuda.kernels.moe_plan import FewPairs, Plan
from penstock.engine.backends.cuda.kernels.mxfp4_fragments import Mxfp4Fragments
from penstock.engine.backends.cuda.kernels.mxfp4_tile import (
    at_powers,
    at_words,
    half_layout,
    inputs_of,
    load_inputs,
    rows_of,
    store_gated,
    tiles_of,
    token_layout,
    weights_of,
    word_layout,
)
from penstock.engine.backends.interface import Activation


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
    WORDS: gl.constexpr = word_layout(WARPS, ROWS)
    HALVES: gl.constexpr = half_layout(WARPS, ROWS)
    POWERS: gl.constexpr = gl.SliceLayout(4, HALVES)
    INPUTS: gl.constexpr = token_layout(WARPS, TOKENS)
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
        tile = tiles_of(block, ROW_TILES, HEIGHT, WORDS)
        tile_p = tiles_of(block, ROW_TILES, HEIGHT, POWERS)
        words = at_words(words_ptr + expert.to(gl.int64) * (ROW_TILES * STEPS * 128), tile * (STEPS * 128), WORDS)
        powers = at_powers(
            exponents_ptr + expert.to(gl.int64) * (ROW_TILES * SPANS * 32), tile_p * (SPANS * 32), POWERS
        )
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
            x = load_inputs(rows, k, gl.minimum(begin * ROUND, STEPS - 1), K)
            for turn in range(begin, end):
                for i in gl.static_range(ROUND):
                    step = turn * ROUND + i
                    if i % 4 == 0:
                        # Of the four steps after these.
                        e_next = gl.load(powers + gl.minimum(step // 4 + 1, SPANS - 1) * 32)
                    taken = ring[i % AHEAD]  # type: ignore[var-annotated]
                    new = gl.load(words + gl.minimum(step + AHEAD, STEPS - 1) * 128)
                    ring = ring[: i % AHEAD] + (new,) + ring[i % AHEAD + 1 :]
                    x_next = load_inputs(rows, k, gl.minimum(step + 1, STEPS - 1), K)
                    acc = mma_v2(weights_of(taken, e, i % 4, HALVES, A, [HEIGHT * 16, 64]), inputs_of(x, B), acc)
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
                        acc = mma_v2(weights_of(taken, e, i % 4, HALVES, A, [HEIGHT * 16, 64]), inputs_of(x, B), acc)
                        if i + 1 < STEPS % ROUND:
                            x = load_inputs(rows, k, step + 1, K)
            row = gl.arange(0, HEIGHT * 16, layout=gl.SliceLayout(1, MMA)) + block * (HEIGHT * 16)
            row, in_row = rows_of(row, WIDE, PAIRED)
            acc *= gl.load(scale_ptr + expert * WIDE + row)[:, None]
            if BIASED:
                bias = gl.load(bias_ptr + expert * WIDE + row).to(gl.float32)
                acc += gl.where(share == 0, bias, 0.0)[:, None]
            if GATED:
                store_gated(acc, out_ptr, m, in_m, block, N, GATE, ALPHA, LIMIT)
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
