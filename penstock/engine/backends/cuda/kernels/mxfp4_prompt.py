"""The grouped product of `moe` on experts in MXFP4 with many tokens to an expert, on Hopper.

Weights go from memory to registers as in `mxfp4_stream`, and from there into the product of a warpgroup; the tokens of
a tile are brought into shared memory by all warps, 64 inputs at a time, in the order of the weights. Two programs share
a multiprocessor: one widens weights while the other multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.engine.backends.cuda.kernels.activation import gate_options
from penstock.engine.backends.cuda.kernels.common import ceil_div, launch
from penstock.engine.backends.cuda.kernels.moe_plan import Plan
from penstock.engine.backends.cuda.kernels.mxfp4_fragments import Mxfp4Fragments
from penstock.engine.backends.cuda.kernels.mxfp4_tile import (
    at_powers,
    at_words,
    bits,
    half_layout,
    load_inputs,
    rows_of,
    store_gated,
    tiles_of,
    weights_of,
    word_layout,
)
from penstock.engine.backends.interface import Activation


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """Shape of the launch."""

    tokens: int
    """Of a tile: 32, 64, 128 or 256."""
    rows: int
    """Tiles of 16 rows to a warp."""
    num_warps: int
    """4 or 8."""
    early: bool = True
    """Whether the next weights are widened before the last are waited for."""
    registers: int = 255
    """Of a thread, at most."""


@constexpr_function
def _input_layout(warps: int, tokens: int) -> gl.DistributedLinearLayout:
    """Of inputs [tokens, 64]: a thread has those that are neighbours in the order of the weights."""
    return gl.DistributedLinearLayout(
        bits(2, 1, 2, 1) + bits(4, 16, 2, 1) + bits(tokens // (4 * warps), 4 * warps, 2, 0),
        bits(8, 2, 2, 1) + bits(4, 1, 2, 0),
        bits(warps, 4, 2, 0),
        [],
        [tokens, 64],
    )


@gluon.jit
def _put_inputs(tile: gl.shared_memory_descriptor, x: gl.tensor) -> None:
    """Inputs [tokens, 64] into a tile, in the order of `weights_of`."""
    TOKENS: gl.constexpr = x.shape[0]
    split = gl.permute(gl.reshape(x, [TOKENS, 4, 2, 2, 2, 2]), (0, 2, 3, 4, 1, 5))
    tile.store(gl.reshape(split, [TOKENS, 64]))


@gluon.jit(do_not_specialize=["tiles"])
def _prompt_kernel(
    x_ptr: gl.tensor,
    words_ptr: gl.tensor,
    exponents_ptr: gl.tensor,
    scale_ptr: gl.tensor,
    bias_ptr: gl.tensor,
    out_ptr: gl.tensor,
    order_ptr: gl.tensor,
    starts_ptr: gl.tensor,
    route_ptr: gl.tensor,
    tiles: gl.tensor,
    N: gl.constexpr,
    K: gl.constexpr,
    TOP_K: gl.constexpr,
    TOKENS: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
    EARLY: gl.constexpr,
    PAIRED: gl.constexpr,
    GATED: gl.constexpr,
    WEIGHTED: gl.constexpr,
    GATE: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    BIASED: gl.constexpr,
    PDL: gl.constexpr,
) -> None:
    """`tiles`: of an expert's tokens that are computed beside each other."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, TOKENS, 16]
    )
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WORDS: gl.constexpr = word_layout(WARPS, ROWS)
    HALVES: gl.constexpr = half_layout(WARPS, ROWS)
    POWERS: gl.constexpr = gl.SliceLayout(4, HALVES)
    INPUTS: gl.constexpr = _input_layout(WARPS, TOKENS)
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WIDE: gl.constexpr = 2 * N if GATED else N
    HEIGHT: gl.constexpr = WARPS * ROWS
    ROW_TILES: gl.constexpr = (WIDE // 2 + 7) // 8 if PAIRED else (WIDE + 15) // 16
    BLOCKS: gl.constexpr = (ROW_TILES + HEIGHT - 1) // HEIGHT
    STEPS: gl.constexpr = (K + 63) // 64
    SPANS: gl.constexpr = (STEPS + 3) // 4
    place = gl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block = place // tiles % BLOCKS
    expert = place // tiles // BLOCKS
    last = gl.load(starts_ptr + expert + 1)
    first = gl.load(starts_ptr + expert) + place % tiles * TOKENS
    if first < last:
        tile = tiles_of(block, ROW_TILES, HEIGHT, WORDS)
        tile_p = tiles_of(block, ROW_TILES, HEIGHT, POWERS)
        words = at_words(words_ptr + expert.to(gl.int64) * (ROW_TILES * STEPS * 128), tile * (STEPS * 128), WORDS)
        powers = at_powers(
            exponents_ptr + expert.to(gl.int64) * (ROW_TILES * SPANS * 32), tile_p * (SPANS * 32), POWERS
        )
        k = gl.arange(0, 64, layout=gl.SliceLayout(0, INPUTS))
        column = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, MMA))
        column_x = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, INPUTS))
        tile0 = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [TOKENS, 64], TILE)
        tile1 = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [TOKENS, 64], TILE)
        for start in range(first, last, tiles * TOKENS):
            m = start + column
            in_m = m < last
            pair = gl.load(order_ptr + m, mask=in_m, other=0)
            # Columns without a token read the row of one that has: they are not stored.
            m_x = gl.minimum(start + column_x, last - 1)
            source = gl.load(order_ptr + m_x) // TOP_K if GATED else m_x
            rows = x_ptr + source.to(gl.int64)[:, None] * K + k[None, :]
            acc = gl.zeros([HEIGHT * 16, TOKENS], gl.float32, layout=MMA)
            e = gl.load(powers)
            x = load_inputs(rows, k, 0, K)
            weights = weights_of(gl.load(words), e, 0, HALVES, A, [HEIGHT * 16, 64])
            gl.thread_barrier()  # the tile before this one has been read
            _put_inputs(tile0, x)
            x = load_inputs(rows, k, gl.minimum(1, STEPS - 1), K)
            taken = gl.load(words + gl.minimum(1, STEPS - 1) * 128)
            fence_async_shared()
            gl.thread_barrier()
            for span in range(STEPS // 4):
                e_next = gl.load(powers + gl.minimum(span + 1, SPANS - 1) * 32)
                for i in gl.static_range(4):
                    if i == 3:
                        e = e_next
                    acc = warpgroup_mma(weights, (tile0 if i % 2 == 0 else tile1).permute([1, 0]), acc, is_async=True)
                    # Warps that read the other tile in the last step have finished it: they have met since.
                    _put_inputs(tile1 if i % 2 == 0 else tile0, x)
                    ahead = gl.minimum(span * 4 + i + 2, STEPS - 1)
                    x = load_inputs(rows, k, ahead, K)
                    new = gl.load(words + ahead * 128)
                    widened = weights_of(taken, e, (i + 1) % 4, HALVES, A, [HEIGHT * 16, 64])
                    taken = new
                    # What is being read stays where it is until then.
                    if EARLY:
                        acc, _, weights = warpgroup_mma_wait(num_outstanding=0, deps=[acc, weights, widened])
                    else:
                        acc, _ = warpgroup_mma_wait(num_outstanding=0, deps=[acc, weights])
                        weights = widened
                    fence_async_shared()
                    gl.thread_barrier()
            for i in gl.static_range(STEPS % 4):
                acc = warpgroup_mma(weights, (tile0 if i % 2 == 0 else tile1).permute([1, 0]), acc, is_async=True)
                if i + 1 < STEPS % 4:
                    _put_inputs(tile1 if i % 2 == 0 else tile0, x)
                    ahead = gl.minimum(STEPS // 4 * 4 + i + 2, STEPS - 1)
                    x = load_inputs(rows, k, ahead, K)
                    widened = weights_of(taken, e, i + 1, HALVES, A, [HEIGHT * 16, 64])
                    taken = gl.load(words + ahead * 128)
                    acc, _ = warpgroup_mma_wait(num_outstanding=0, deps=[acc, weights])
                    weights = widened
                    fence_async_shared()
                    gl.thread_barrier()
                else:
                    acc, _ = warpgroup_mma_wait(num_outstanding=0, deps=[acc, weights])
            row = gl.arange(0, HEIGHT * 16, layout=gl.SliceLayout(1, MMA)) + block * (HEIGHT * 16)
            row, in_row = rows_of(row, WIDE, PAIRED)
            acc *= gl.load(scale_ptr + expert * WIDE + row)[:, None]
            if BIASED:
                acc += gl.load(bias_ptr + expert * WIDE + row).to(gl.float32)[:, None]
            if GATED:
                store_gated(acc, out_ptr, m, in_m, block, N, GATE, ALPHA, LIMIT)
            else:
                if WEIGHTED:
                    acc *= gl.load(route_ptr + pair, mask=in_m, other=0.0)[None, :]
                target = out_ptr + pair.to(gl.int64)[None, :] * N + row[:, None]
                gl.store(target, acc.to(out_ptr.dtype.element_ty), mask=in_m[None, :] & in_row[:, None])


def grouped_linear(
    x: Tensor,
    stack: Mxfp4Fragments,
    bias: Tensor | None,
    schedule: Plan,
    top_k: int,
    *,
    gated: bool,
    route_weights: Tensor | None = None,
    activation: Activation = "silu",
    config: PromptConfig,
    pdl: bool = False,
) -> Tensor:
    """As `moe.grouped_linear`. Weights of a gated product are `paired`, and route weights meet its outputs alone."""
    experts, outputs = stack.scale.shape
    n, pairs = outputs // 2 if gated else outputs, schedule.pairs
    assert stack.paired or not gated
    assert not gated or route_weights is None
    out = torch.empty((pairs, n), dtype=x.dtype, device=x.device)
    if pairs == 0:
        return out
    blocks = ceil_div(stack.words.shape[1], config.num_warps * config.rows)
    # Programs for twice an equal share: those of experts with less have nothing to do, those with more take turns.
    tiles = 2 * ceil_div(pairs, experts * config.tokens)
    launch(
        _prompt_kernel,
        (experts * tiles * blocks,),
        x,
        *stack.tensors,
        x if bias is None else bias,
        out,
        *schedule.pointers,
        x if route_weights is None else route_weights,
        tiles,
        N=n,
        K=x.shape[1],
        TOP_K=top_k,
        TOKENS=config.tokens,
        ROWS=config.rows,
        WARPS=config.num_warps,
        EARLY=config.early,
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
