"""The grouped product of `moe` on experts in MXFP4 with about as many tokens to an expert as a product takes.

Weights go from memory to registers as in `mxfp4_stream`. The tokens of a tile are brought into shared memory by
asynchronous copies, 256 inputs at a time and some turns ahead, so that they take neither registers nor instructions
while they are under way. Experts with up to eight tokens have narrower products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.engine.backends.cuda.kernels.activation import gate_options
from penstock.engine.backends.cuda.kernels.common import ceil_div, launch
from penstock.engine.backends.cuda.kernels.moe_plan import Plan
from penstock.engine.backends.cuda.kernels.mxfp4_fragments import Mxfp4Fragments
from penstock.engine.backends.cuda.kernels.mxfp4_tile import (
    at_powers,
    at_words,
    half_layout,
    in_order,
    inputs_of,
    rows_of,
    store_gated,
    tiles_of,
    token_layout,
    weights_of,
    word_layout,
)
from penstock.engine.backends.interface import Activation


@dataclass(frozen=True, slots=True)
class StagedConfig:
    """Shape of the launch."""

    tokens: int
    """Of a tile: 16 or 32."""
    rows: int
    """Tiles of 16 rows to a warp."""
    num_warps: int
    ahead: int
    """Steps of 64 inputs whose weights are read before those ahead of them are multiplied: 1, 2 or 4."""
    stages: int = 3
    """Turns of four steps whose tokens are in shared memory, or on their way there."""
    narrow: int = 8
    """Tokens up to which an expert takes a narrower product: 0, or less than `tokens`."""
    registers: int = 128
    """Of a thread, at most."""


@gluon.jit
def _stage(
    place: gl.shared_memory_descriptor,
    rows: gl.tensor,
    step: gl.tensor,
    k: gl.tensor,
    turn: gl.tensor,
    K: gl.constexpr,
) -> None:
    """Begin to copy the tokens of a turn [4, tokens, 64], with zeros past the last input. Steps past the last are the
    last again: nobody reads them."""
    at = gl.minimum(turn * 4 + step, (K + 63) // 64 - 1)[:, None, None] * 64 + k[None, None, :]
    if K % 64 != 0:
        async_copy.async_copy_global_to_shared(place, rows + at, mask=at < K)
    else:
        async_copy.async_copy_global_to_shared(place, rows + at)
    async_copy.commit_group()


@gluon.jit
def _tile(
    inputs: gl.shared_memory_descriptor,
    x_ptr: gl.tensor,
    words: gl.tensor,
    powers: gl.tensor,
    scale_ptr: gl.tensor,
    bias_ptr: gl.tensor,
    out_ptr: gl.tensor,
    order_ptr: gl.tensor,
    route_ptr: gl.tensor,
    expert: gl.tensor,
    block: gl.tensor,
    start: gl.tensor,
    last: gl.tensor,
    N: gl.constexpr,
    K: gl.constexpr,
    TOP_K: gl.constexpr,
    TOKENS: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
    AHEAD: gl.constexpr,
    STAGES: gl.constexpr,
    PAIRED: gl.constexpr,
    GATED: gl.constexpr,
    WEIGHTED: gl.constexpr,
    GATE: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    BIASED: gl.constexpr,
) -> None:
    """The tokens from `start` on, up to `TOKENS` of them."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    HALVES: gl.constexpr = half_layout(WARPS, ROWS)
    INPUTS: gl.constexpr = token_layout(WARPS, TOKENS)
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [1, WARPS, 1], [2, 1, 0])
    KIND: gl.constexpr = x_ptr.dtype.element_ty
    STAGE_STEPS: gl.constexpr = STAGES * 4
    WIDE: gl.constexpr = 2 * N if GATED else N
    HEIGHT: gl.constexpr = WARPS * ROWS
    STEPS: gl.constexpr = (K + 63) // 64
    SPANS: gl.constexpr = (STEPS + 3) // 4
    TURNS: gl.constexpr = STEPS // 4
    e = gl.load(powers)
    ring = ()
    for i in gl.static_range(AHEAD):
        ring = ring + (gl.load(words + gl.minimum(i, STEPS - 1) * 128),)  # type: ignore[assignment]
    # Columns without a token read the row of one that has: they are not stored.
    k = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, COPY)))
    step = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY)))
    m_x = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY)))
    m_x = gl.minimum(start + m_x, last - 1)
    source = gl.load(order_ptr + m_x) // TOP_K if GATED else m_x
    rows = x_ptr + (source.to(gl.int64) * K)[None, :, None]
    # Neighbouring rows of a step lie in different banks for threads that read 16 bytes of every second piece.
    turns = inputs._reinterpret(KIND, [STAGES, 4, TOKENS, 64], gl.SwizzledSharedLayout(8, 1, 2, order=[2, 1, 0]))
    steps = inputs._reinterpret(KIND, [STAGE_STEPS, TOKENS, 64], gl.SwizzledSharedLayout(8, 1, 2, order=[1, 0]))
    gl.thread_barrier()  # the tile before this one has been read
    for i in gl.static_range(STAGES - 1):
        _stage(turns.index(i), rows, step, k, i, K)
    acc = gl.zeros([HEIGHT * 16, TOKENS], gl.float32, layout=MMA)
    for turn in range(TURNS):
        # All warps' copies of this turn are there, and all have read what the next copies write over.
        async_copy.wait_group(STAGES - 2)
        gl.thread_barrier()
        _stage(turns.index((turn + STAGES - 1) % STAGES), rows, step, k, turn + STAGES - 1, K)
        e_next = gl.load(powers + gl.minimum(turn + 1, SPANS - 1) * 32)
        for i in gl.static_range(4):
            weights = weights_of(ring[i % AHEAD], e, i, HALVES, A, [HEIGHT * 16, 64])
            x = steps.index(turn % STAGES * 4 + i).load(INPUTS)
            acc = mma_v2(weights, inputs_of(x, B), acc)
            new = gl.load(words + gl.minimum(turn * 4 + i + AHEAD, STEPS - 1) * 128)
            ring = ring[: i % AHEAD] + (new,) + ring[i % AHEAD + 1 :]
            in_order(WARPS)
        e = e_next
    async_copy.wait_group(STAGES - 2)
    if STEPS % 4 != 0:
        gl.thread_barrier()
        for i in gl.static_range(STEPS % 4):
            taken = ring[i % AHEAD]  # type: ignore[var-annotated]
            if i + AHEAD < STEPS % 4:
                new = gl.load(words + (TURNS * 4 + i + AHEAD) * 128)
                ring = ring[: i % AHEAD] + (new,) + ring[i % AHEAD + 1 :]
            x = steps.index(TURNS % STAGES * 4 + i).load(INPUTS)
            acc = mma_v2(weights_of(taken, e, i, HALVES, A, [HEIGHT * 16, 64]), inputs_of(x, B), acc)
    async_copy.wait_group(0)
    m = start + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, MMA))
    in_m = m < last
    row = gl.arange(0, HEIGHT * 16, layout=gl.SliceLayout(1, MMA)) + block * (HEIGHT * 16)
    row, in_row = rows_of(row, WIDE, PAIRED)
    acc *= gl.load(scale_ptr + expert * WIDE + row)[:, None]
    if BIASED:
        acc += gl.load(bias_ptr + expert * WIDE + row).to(gl.float32)[:, None]
    if GATED:
        store_gated(acc, out_ptr, m, in_m, block, N, GATE, ALPHA, LIMIT)
    else:
        pair = gl.load(order_ptr + m, mask=in_m, other=0)
        if WEIGHTED:
            acc *= gl.load(route_ptr + pair, mask=in_m, other=0.0)[None, :]
        target = out_ptr + pair.to(gl.int64)[None, :] * N + row[:, None]
        gl.store(target, acc.to(out_ptr.dtype.element_ty), mask=in_m[None, :] & in_row[:, None])


@gluon.jit(do_not_specialize=["tiles"])
def _staged_kernel(
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
    NARROW: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
    AHEAD: gl.constexpr,
    STAGES: gl.constexpr,
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
    WORDS: gl.constexpr = word_layout(WARPS, ROWS)
    POWERS: gl.constexpr = gl.SliceLayout(4, half_layout(WARPS, ROWS))
    WIDE: gl.constexpr = 2 * N if GATED else N
    HEIGHT: gl.constexpr = WARPS * ROWS
    ROW_TILES: gl.constexpr = (WIDE // 2 + 7) // 8 if PAIRED else (WIDE + 15) // 16
    BLOCKS: gl.constexpr = (ROW_TILES + HEIGHT - 1) // HEIGHT
    STEPS: gl.constexpr = (K + 63) // 64
    SPANS: gl.constexpr = (STEPS + 3) // 4
    place = gl.program_id(0)
    block = place // tiles % BLOCKS
    expert = place // tiles // BLOCKS
    tile = tiles_of(block, ROW_TILES, HEIGHT, WORDS)
    tile_p = tiles_of(block, ROW_TILES, HEIGHT, POWERS)
    words = at_words(words_ptr + expert.to(gl.int64) * (ROW_TILES * STEPS * 128), tile * (STEPS * 128), WORDS)
    powers = at_powers(exponents_ptr + expert.to(gl.int64) * (ROW_TILES * SPANS * 32), tile_p * (SPANS * 32), POWERS)
    WHOLE: gl.constexpr = STAGES * 4 * TOKENS * 64
    inputs = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [WHOLE], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    last = gl.load(starts_ptr + expert + 1)
    first = gl.load(starts_ptr + expert) + place % tiles * TOKENS
    for start in range(first, last, tiles * TOKENS):
        if NARROW > 0:
            if last - start <= NARROW:
                _tile(
                    inputs, x_ptr, words, powers, scale_ptr, bias_ptr, out_ptr, order_ptr, route_ptr, expert, block,
                    start, last, N, K, TOP_K, NARROW, ROWS, WARPS, AHEAD, STAGES, PAIRED, GATED, WEIGHTED, GATE, ALPHA,
                    LIMIT, BIASED,
                )  # fmt: skip
            else:
                _tile(
                    inputs, x_ptr, words, powers, scale_ptr, bias_ptr, out_ptr, order_ptr, route_ptr, expert, block,
                    start, last, N, K, TOP_K, TOKENS, ROWS, WARPS, AHEAD, STAGES, PAIRED, GATED, WEIGHTED, GATE, ALPHA,
                    LIMIT, BIASED,
                )  # fmt: skip
        else:
            _tile(
                inputs, x_ptr, words, powers, scale_ptr, bias_ptr, out_ptr, order_ptr, route_ptr, expert, block,
                start, last, N, K, TOP_K, TOKENS, ROWS, WARPS, AHEAD, STAGES, PAIRED, GATED, WEIGHTED, GATE, ALPHA,
                LIMIT, BIASED,
            )  # fmt: skip


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
    config: StagedConfig,
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
    # Experts with more tokens than an equal share go through several tiles one after the other.
    tiles = max(1, ceil_div(pairs, experts * config.tokens))
    launch(
        _staged_kernel,
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
        NARROW=config.narrow,
        ROWS=config.rows,
        WARPS=config.num_warps,
        AHEAD=config.ahead,
        STAGES=config.stages,
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
