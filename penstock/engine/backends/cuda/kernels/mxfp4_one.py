"""The experts of one token in MXFP4: reading the weights of those it visits is all there is.

Two launches, as in `moe_one`, on weights in the order of threads. A warp has 16 rows and a share of their inputs; the
warps of a program add up what they have in shared memory. In the first launch they are the shares of one visit, and
every program finds its expert itself where it is given scores. In the second they are the shares of all visits, so
that the sum of the experts and the residual stream is made in the same place. The first asks for the weights of the
second when it has asked for all of its own, so that memory is busy while one launch ends and the other begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.engine.backends.cuda.kernels.activation import gate_options
from penstock.engine.backends.cuda.kernels.common import INTERPRETED, ceil_div, launch, next_power_of_2
from penstock.engine.backends.cuda.kernels.moe_one import Visits
from penstock.engine.backends.cuda.kernels.mxfp4_fragments import Mxfp4Fragments
from penstock.engine.backends.cuda.kernels.mxfp4_tile import (
    at_powers,
    at_words,
    bits,
    gated,
    half_layout,
    rows_of,
    weights_of,
    word_layout,
)
from penstock.engine.backends.interface import Activation

_PIECES = 8
"""Threads of a program that ask for its share of the next weights."""


@dataclass(frozen=True, slots=True)
class WarpShares:
    """Shape of a launch."""

    shares: int
    """Warps among which the inputs of a visit are divided: a power of two."""
    ahead: int
    """Steps of 64 inputs that are under way at once: a multiple of four."""
    registers: int = 255
    """Of a thread, at most."""


GATE_UP = WarpShares(2, 8, 88)
DOWN = WarpShares(4, 4, 64)


@constexpr_function
def _lanes(count: int, rank: int, axis: int) -> list[list[int]]:
    """Bases of the threads of a warp along an axis; those that are too many have what others have."""
    found: list[list[int]] = bits(min(32, count), 1, rank, axis)
    return found + [[0] * rank for _ in range(5 - len(found))]


@constexpr_function
def _rank_layout(warps: int, block: int) -> gl.DistributedLinearLayout:
    """Of pairs of experts: the same in every warp, and all seconds of a first in one thread."""
    return gl.DistributedLinearLayout(
        bits(block, 1, 2, 1) + (bits(block // 32, 32, 2, 0) if block > 32 else []),
        _lanes(block, 2, 0),
        [[0, 0] for _ in bits(warps, 1, 2, 0)],
        [],
        [block, block],
    )


@constexpr_function
def _input_layout(warps: int) -> gl.DistributedLinearLayout:
    """Of inputs [warps, 8, 64]: see `mxfp4_stream`; the eight are one token."""
    return gl.DistributedLinearLayout(
        bits(16, 1, 3, 2),
        bits(4, 16, 3, 2) + bits(8, 1, 3, 1),
        bits(warps, 1, 3, 0),
        [],
        [warps, 8, 64],
    )


@gluon.jit
def _operand(x: gl.tensor, INPUTS: gl.constexpr, OPERAND: gl.constexpr) -> gl.tensor:
    """Operand [warps, 64, 8] of inputs [warps, 64], in the order of `weights_of`."""
    WARPS: gl.constexpr = x.shape[0]
    alike, _ = gl.broadcast(gl.expand_dims(x, 1), gl.zeros([WARPS, 8, 64], x.dtype, layout=INPUTS))
    split = gl.permute(gl.reshape(alike, [WARPS, 8, 4, 2, 2, 2, 2]), (0, 3, 4, 5, 2, 6, 1))
    return gl.convert_layout(gl.reshape(split, [WARPS, 64, 8]), OPERAND, assert_trivial=True)


@gluon.jit
def _ask(at: gl.tensor, size: gl.tensor, wanted: gl.tensor) -> None:
    """Bring `size` bytes at each address into the L2 cache."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r,r",
        [at.to(gl.int64), size, wanted],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _ask_share(
    start_ptr: gl.tensor,
    expert: gl.tensor,
    share: gl.tensor,
    SHARES: gl.constexpr,
    WORDS: gl.constexpr,
    PIECES: gl.constexpr,
    THREADS: gl.constexpr,
    WARPS: gl.constexpr,
) -> None:
    """Ask for one of `SHARES` shares of the `WORDS` words of an expert."""
    # In units of 16 bytes: pieces of a share are alike, and the last ones overlap.
    PIECE: gl.constexpr = (WORDS // 4 + SHARES * PIECES - 1) // (SHARES * PIECES)
    i = gl.arange(0, THREADS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    first = gl.minimum((share * PIECES + i) * PIECE, gl.maximum(WORDS // 4 - PIECE, 0))
    at = start_ptr + expert * WORDS + first * 4
    _ask(at, gl.full([THREADS], PIECE * 16, gl.int32, layout=i.type.layout), (i < PIECES).to(gl.int32))


@gluon.jit
def _expert_at(
    visit: gl.tensor, logits_ptr: gl.tensor, EXPERTS: gl.constexpr, BLOCK_E: gl.constexpr, WARPS: gl.constexpr
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """The expert whose score has the place `visit` in their order; all scores, and their places."""
    PAIRS: gl.constexpr = _rank_layout(WARPS, BLOCK_E)
    e = gl.arange(0, BLOCK_E, layout=gl.SliceLayout(1, PAIRS))
    other = gl.arange(0, BLOCK_E, layout=gl.SliceLayout(0, PAIRS))
    x = gl.load(logits_ptr + e, mask=e < EXPERTS, other=float("-inf"))
    y = gl.load(logits_ptr + other, mask=other < EXPERTS, other=float("-inf"))
    before = (y[None, :] > x[:, None]) | ((y[None, :] == x[:, None]) & (other[None, :] < e[:, None]))
    place = gl.sum(before.to(gl.int32), axis=1)
    return gl.sum(gl.where(place == visit, e, 0), axis=0), x, place


@gluon.jit
def _weight_at(
    visit: gl.tensor,
    x: gl.tensor,
    place: gl.tensor,
    TOP_K: gl.constexpr,
    NORMALIZE: gl.constexpr,
    SIGMOID: gl.constexpr,
    SCALE: gl.constexpr,
) -> gl.tensor:
    """As `moe_one` has it."""
    if SIGMOID:
        p = 1.0 / (1.0 + gl.exp(-x))
        total = 1.0
    else:
        p = gl.exp(x - gl.max(x, axis=0))
        total = gl.sum(p, axis=0)
    if NORMALIZE:
        total = gl.sum(gl.where(place < TOP_K, p, 0.0), axis=0)
        if SIGMOID:
            total += 1e-20
    return gl.sum(gl.where(place == visit, p, 0.0), axis=0) / total * SCALE


@gluon.jit
def _one_kernel(
    x_ptr: gl.tensor,
    words_ptr: gl.tensor,
    exponents_ptr: gl.tensor,
    scale_ptr: gl.tensor,
    bias_ptr: gl.tensor,
    chosen_ptr: gl.tensor,
    route_ptr: gl.tensor,
    logits_ptr: gl.tensor,
    out_ptr: gl.tensor,
    next_words_ptr: gl.tensor,
    next_exponents_ptr: gl.tensor,
    N: gl.constexpr,
    K: gl.constexpr,
    EXPERTS: gl.constexpr,
    TOP_K: gl.constexpr,
    VISITS: gl.constexpr,
    SHARES: gl.constexpr,
    AHEAD: gl.constexpr,
    STAGED: gl.constexpr,
    GATED: gl.constexpr,
    GATE: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    BIASED: gl.constexpr,
    RESIDUAL: gl.constexpr,
    CHOOSES: gl.constexpr,
    BLOCK_E: gl.constexpr,
    NORMALIZE: gl.constexpr,
    SIGMOID: gl.constexpr,
    SCALE: gl.constexpr,
    NEXT_WORDS: gl.constexpr,
    NEXT_EXPONENTS: gl.constexpr,
    PIECES: gl.constexpr,
    PDL: gl.constexpr,
) -> None:
    """`VISITS` of a program: one where it gates, all of them where it does not, and then a power of two."""
    WARPS: gl.constexpr = VISITS * SHARES
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    WORDS: gl.constexpr = word_layout(WARPS, 1)
    HALVES: gl.constexpr = half_layout(WARPS, 1)
    POWERS: gl.constexpr = gl.SliceLayout(4, HALVES)
    WARP_W: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, WORDS)))
    WARP_P: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, POWERS)))
    WARP_S: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, MMA))
    INPUTS: gl.constexpr = _input_layout(WARPS)
    WIDE: gl.constexpr = 2 * N if GATED else N
    ROW_TILES: gl.constexpr = (N + 7) // 8 if GATED else (N + 15) // 16
    STEPS: gl.constexpr = (K + 63) // 64
    SPANS: gl.constexpr = (STEPS + 3) // 4
    RING: gl.constexpr = AHEAD // 4
    TURNS: gl.constexpr = (SPANS + SHARES * RING - 1) // (SHARES * RING)
    SHARE: gl.constexpr = TURNS * AHEAD
    KIND: gl.constexpr = x_ptr.dtype.element_ty
    pid = gl.program_id(0)
    visit = pid // ROW_TILES
    tile = pid % ROW_TILES
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # The inputs of every warp, step by step; zeros past the last.
    LOADED: gl.constexpr = gl.BlockedLayout([1, 1, 8], [4, 1, 8], [1, WARPS, 1], [2, 1, 0])
    step = gl.arange(0, STAGED, layout=gl.SliceLayout(1, gl.SliceLayout(2, LOADED)))
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LOADED)))
    k = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, LOADED)))
    at = ((warp % SHARES * SHARE)[None, :, None] + step[:, None, None]) * 64 + k[None, None, :]
    seen = (at < K) & (step < SHARE)[:, None, None]
    if not GATED:
        at += (gl.minimum(warp // SHARES, TOP_K - 1) * K)[None, :, None]
    staged = gl.load(x_ptr + at, mask=seen, other=0.0)
    if CHOOSES:
        expert, scores, places = _expert_at(visit, logits_ptr, EXPERTS, BLOCK_E, WARPS)
    else:
        expert = gl.load(chosen_ptr + visit)
    # Scores that are not numbers may choose no expert.
    expert = gl.maximum(gl.minimum(expert, EXPERTS - 1), 0)
    warp_w = gl.arange(0, WARPS, layout=WARP_W)
    warp_p = gl.arange(0, WARPS, layout=WARP_P)
    if GATED:
        expert_w = (warp_w * 0 + expert).to(gl.int64)
        expert_p = (warp_p * 0 + expert).to(gl.int64)
    else:
        expert_w = gl.load(chosen_ptr + gl.minimum(warp_w // SHARES, TOP_K - 1))
        expert_p = gl.load(chosen_ptr + gl.minimum(warp_p // SHARES, TOP_K - 1))
        expert_w = gl.maximum(gl.minimum(expert_w, EXPERTS - 1), 0).to(gl.int64)
        expert_p = gl.maximum(gl.minimum(expert_p, EXPERTS - 1), 0).to(gl.int64)
    words = at_words(words_ptr, (expert_w * ROW_TILES + tile) * (STEPS * 128), WORDS)
    powers = at_powers(exponents_ptr, (expert_p * ROW_TILES + tile) * (SPANS * 32), POWERS)
    first_w = (warp_w % SHARES * SHARE)[:, None, None, None]
    first_p = (warp_p % SHARES * (SHARE // 4))[:, None, None, None]
    # Steps past the last read it again: their inputs are zeros.
    ring = ()
    ring_e = ()
    for i in gl.static_range(AHEAD):
        if i % 4 == 0:
            ring_e = ring_e + (gl.load(powers + gl.minimum(first_p + i // 4, SPANS - 1) * 32),)  # type: ignore[assignment]
        ring = ring + (gl.load(words + gl.minimum(first_w + i, STEPS - 1) * 128),)  # type: ignore[assignment]
    whole = gl.allocate_shared_memory(KIND, [STAGED, WARPS, 64], gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0]))
    whole.store(staged)
    inputs = whole._reinterpret(KIND, [STAGED, WARPS, 64], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
    gl.thread_barrier()
    acc = gl.zeros([WARPS, 16, 8], gl.float32, layout=MMA)
    for turn in range(TURNS):
        for i in gl.static_range(AHEAD):
            now = turn * AHEAD + i
            taken = ring[i]  # type: ignore[var-annotated]
            e = ring_e[i // 4]  # type: ignore[var-annotated]
            if TURNS > 1:
                new = gl.load(words + gl.minimum(first_w + now + AHEAD, STEPS - 1) * 128)
                ring = ring[:i] + (new,) + ring[i + 1 :]
            x = _operand(inputs.index(now).load(gl.SliceLayout(1, INPUTS)), INPUTS, B)
            acc = mma_v2(weights_of(taken, e, i % 4, HALVES, A, [WARPS, 16, 64]), x, acc)
            if TURNS > 1 and i % 4 == 3:
                new_e = gl.load(powers + gl.minimum(first_p + (now + AHEAD) // 4, SPANS - 1) * 32)
                ring_e = ring_e[: i // 4] + (new_e,) + ring_e[i // 4 + 1 :]
    THREADS: gl.constexpr = 32 * WARPS
    if NEXT_WORDS > 0 and PDL:
        # All that this program reads has been asked for.
        wide = expert.to(gl.int64)
        _ask_share(next_words_ptr, wide, tile, ROW_TILES, NEXT_WORDS, PIECES, THREADS, WARPS)
        _ask_share(next_exponents_ptr, wide, tile, ROW_TILES, NEXT_EXPONENTS, 1, THREADS, WARPS)
    if CHOOSES:  # noqa: SIM102 - known when compiled; the other is not
        if tile == 0:
            # For what comes next.
            gl.store(chosen_ptr + visit, expert)
            gl.store(route_ptr + visit, _weight_at(visit, scores, places, TOP_K, NORMALIZE, SIGMOID, SCALE))
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA))) + tile * 16
    row, _ = rows_of(row, WIDE, GATED)
    warp_s = gl.arange(0, WARPS, layout=WARP_S)
    if GATED:
        expert_s = warp_s * 0 + expert
    else:
        expert_s = gl.load(chosen_ptr + gl.minimum(warp_s // SHARES, TOP_K - 1))
        expert_s = gl.maximum(gl.minimum(expert_s, EXPERTS - 1), 0)
    at = expert_s[:, None] * WIDE + row[None, :]
    acc *= gl.expand_dims(gl.load(scale_ptr + at), 2)
    if BIASED:
        bias = gl.load(bias_ptr + at).to(gl.float32)
        acc += gl.expand_dims(gl.where((warp_s % SHARES == 0)[:, None], bias, 0.0), 2)
    if not GATED:
        route = gl.load(route_ptr + gl.minimum(warp_s // SHARES, TOP_K - 1))
        acc *= route[:, None, None]
        if VISITS > TOP_K:
            acc = gl.where((warp_s < TOP_K * SHARES)[:, None, None], acc, 0.0)
    total = gl.sum(acc, axis=0)
    if GATED:
        gate, up = gl.split(gl.permute(gl.reshape(total, [2, 8, 8]), (1, 2, 0)))
        y = gated(gate, up, GATE, ALPHA, LIMIT)
        n = gl.arange(0, 8, layout=gl.SliceLayout(1, y.type.layout)) + tile * 8
        column = gl.arange(0, 8, layout=gl.SliceLayout(0, y.type.layout))
        mask = (n < N)[:, None] & (column == 0)[None, :]
        at = visit * N + n[:, None] + column[None, :]
        gl.store(out_ptr + at, y.to(KIND), mask=mask)
    else:
        n = gl.arange(0, 16, layout=gl.SliceLayout(1, total.type.layout)) + tile * 16
        column = gl.arange(0, 8, layout=gl.SliceLayout(0, total.type.layout))
        mask = (n < N)[:, None] & (column == 0)[None, :]
        at = n[:, None] + column[None, :]
        if RESIDUAL:
            total += gl.load(out_ptr + at, mask=mask, other=0.0).to(gl.float32)
        gl.store(out_ptr + at, total.to(KIND), mask=mask)


def takes(x: Tensor) -> bool:
    """Whether these kernels multiply by a token like `x`; `moe_mxfp4` multiplies by any."""
    return x.dtype == torch.bfloat16 and not INTERPRETED.value


def gate_up(
    x: Tensor,
    stack: Mxfp4Fragments,
    bias: Tensor | None,
    visits: Visits,
    activation: Activation,
    *,
    following: Mxfp4Fragments | None = None,
    config: WarpShares = GATE_UP,
    pdl: bool = False,
) -> Tensor:
    """act(gate) * up of `x` [1, K] by the experts it visits: [visits, width]. `stack` is `paired`; `following`: the
    matrices that those experts read next."""
    assert stack.paired and not visits.on_inputs
    width = stack.outputs // 2
    choice = None if visits.logits is None else visits.choice
    out = torch.empty((visits.count, width), dtype=x.dtype, device=x.device)
    _launch(
        (visits.count * stack.words.shape[1],), x, stack, bias, visits, out, following, config, pdl,
        N=width, VISITS=1, GATED=True, RESIDUAL=False, CHOOSES=choice is not None,
        NORMALIZE=choice is not None and choice.normalize,
        SIGMOID=choice is not None and choice.sigmoid,
        SCALE=1.0 if choice is None else choice.scale,
        **gate_options(activation),
    )  # fmt: skip
    return out


def down(
    inner: Tensor,
    stack: Mxfp4Fragments,
    bias: Tensor | None,
    visits: Visits,
    *,
    residual: Tensor | None = None,
    config: WarpShares = DOWN,
    pdl: bool = False,
) -> Tensor:
    """The sum [1, N] over what `gate_up` left, times matrices [N, width]; `residual` [1, N] is added to in place."""
    assert not stack.paired and not visits.on_inputs
    out = residual
    if out is None:
        out = torch.empty((1, stack.outputs), dtype=inner.dtype, device=inner.device)
    _launch(
        (stack.words.shape[1],), inner, stack, bias, visits, out, None, config, pdl,
        N=stack.outputs, VISITS=next_power_of_2(visits.count), GATED=False, RESIDUAL=residual is not None,
        CHOOSES=False, NORMALIZE=False, SIGMOID=False, SCALE=1.0, **gate_options("silu"),
    )  # fmt: skip
    return out


def _launch(
    grid: tuple[int],
    x: Tensor,
    stack: Mxfp4Fragments,
    bias: Tensor | None,
    visits: Visits,
    out: Tensor,
    following: Mxfp4Fragments | None,
    config: WarpShares,
    pdl: bool,
    **options: Any,
) -> None:
    experts, spans = stack.scale.shape[0], stack.exponents.shape[2]
    turns = ceil_div(spans, config.shares * (config.ahead // 4))
    warps = options["VISITS"] * config.shares
    launch(
        _one_kernel,
        grid,
        x,
        *stack.tensors,
        x if bias is None else bias,
        visits.chosen,
        visits.weights,
        x if visits.logits is None else visits.logits,
        out,
        *(stack.tensors if following is None else following.tensors)[:2],
        K=stack.inputs,
        EXPERTS=experts,
        TOP_K=visits.count,
        SHARES=config.shares,
        AHEAD=config.ahead,
        STAGED=next_power_of_2(turns * config.ahead),
        BIASED=bias is not None,
        BLOCK_E=next_power_of_2(experts),
        NEXT_WORDS=0 if following is None else following.words[0].numel(),
        NEXT_EXPONENTS=0 if following is None else following.exponents[0].numel(),
        PIECES=_PIECES,
        **options,
        num_warps=warps,
        maxnreg=config.registers,
        pdl=pdl,
    )
