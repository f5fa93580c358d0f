"""The experts of one token in MXFP4, in one launch: reading the weights of those it visits is all there is.

A warp has 16 rows and a share of their inputs; the warps of a program add up what they have in shared memory. In the
first part these are rows of gates and ups of some visit, and every program finds the experts itself where it is given
scores. Then all programs wait for each other. In the second part they are rows of the output for all visits, so that
the sum of the experts and the residual stream is made in one place; those weights are on their way meanwhile.

Invariant: all programs are there at once, or they would wait forever. So the launch is no larger than what the
multiprocessors hold, kernels before it end without it, and those behind it do not start before all of it has. Two of
them must not run at the same time: one stream of a process has them, and ranks that share a device do not use them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.engine.backends.cuda.exclusive import shares_processors
from penstock.engine.backends.cuda.kernels.activation import gate_options
from penstock.engine.backends.cuda.kernels.common import INTERPRETED, ceil_div, launch, next_power_of_2
from penstock.engine.backends.cuda.kernels.expert_ranks import of_visit, ranked, totals
from penstock.engine.backends.cuda.kernels.moe_one import Visits
from penstock.engine.backends.cuda.kernels.mxfp4_fragments import Mxfp4Fragments
from penstock.engine.backends.cuda.kernels.mxfp4_tile import (
    at_powers,
    at_words,
    bits,
    gated,
    half_layout,
    in_order,
    rows_of,
    weights_of,
    word_layout,
)
from penstock.engine.backends.interface import Activation

SHARES = 2
"""Warps among which the inputs of 16 rows are divided: a power of two."""
AHEAD = 8
"""Steps of 64 inputs that are under way at once: a multiple of four."""
REGISTERS = 80
"""Of a thread, at most: for 24 warps to a multiprocessor."""
_SCRATCH = 512
"""Bytes of shared memory in which a warp leaves its sums to others."""
_RESERVED = 1024
"""Bytes of shared memory that the system takes for every program."""


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
def _first_words(
    words: gl.tensor,
    powers: gl.tensor,
    first_w: gl.tensor,
    first_p: gl.tensor,
    present: gl.tensor,
    K: gl.constexpr,
    AHEAD: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Begin to read a share's first steps, if `present`. Steps past the last are the last again: their inputs are
    zeros."""
    STEPS: gl.constexpr = (K + 63) // 64
    SPANS: gl.constexpr = (STEPS + 3) // 4
    ring = ()
    ring_e = ()
    for i in gl.static_range(AHEAD):
        if i % 4 == 0:
            span = gl.minimum(first_p + i // 4, SPANS - 1)
            ring_e = ring_e + (gl.load(powers + span * 32, mask=(span >= 0) & present, other=0),)  # type: ignore[assignment]
        step = gl.minimum(first_w + i, STEPS - 1)
        ring = ring + (gl.load(words + step * 128, mask=(step >= 0) & present, other=0),)  # type: ignore[assignment]
    return ring, ring_e


@gluon.jit
def _read_inputs(
    x_ptr: gl.tensor,
    ROW: gl.constexpr,
    ROWS: gl.constexpr,
    K: gl.constexpr,
    SHARES: gl.constexpr,
    SHARE: gl.constexpr,
    STAGED: gl.constexpr,
    WARPS: gl.constexpr,
) -> gl.tensor:
    """The inputs [steps, warps, 64] of every warp, with zeros past the last; those of warp `i` are in row
    `i // SHARES` of `ROWS`, which lie `ROW` apart."""
    LOADED: gl.constexpr = gl.BlockedLayout([1, 1, 8], [4, 1, 8], [1, WARPS, 1], [2, 1, 0])
    step = gl.arange(0, STAGED, layout=gl.SliceLayout(1, gl.SliceLayout(2, LOADED)))
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LOADED)))
    k = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, LOADED)))
    at = ((warp % SHARES * SHARE)[None, :, None] + step[:, None, None]) * 64 + k[None, None, :]
    seen = (at < K) & (step < SHARE)[:, None, None]
    at += (gl.minimum(warp // SHARES, ROWS - 1) * ROW)[None, :, None]
    # Not from the L1 cache: other programs may have written them.
    return gl.load(x_ptr + at, mask=seen, other=0.0, cache_modifier=".cg")


@gluon.jit
def _multiplied(
    inputs: gl.shared_memory_descriptor,
    staged: gl.tensor,
    words: gl.tensor,
    powers: gl.tensor,
    first_w: gl.tensor,
    first_p: gl.tensor,
    ring: gl.tensor,
    ring_e: gl.tensor,
    K: gl.constexpr,
    AHEAD: gl.constexpr,
    TURNS: gl.constexpr,
    STAGED: gl.constexpr,
    WARPS: gl.constexpr,
) -> gl.tensor:
    """The sums [warps, 16, 8] of every warp; the eight are one token."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    HALVES: gl.constexpr = half_layout(WARPS, 1)
    INPUTS: gl.constexpr = _input_layout(WARPS)
    STEPS: gl.constexpr = (K + 63) // 64
    SPANS: gl.constexpr = (STEPS + 3) // 4
    KIND: gl.constexpr = staged.dtype
    whole = inputs._reinterpret(KIND, [STAGED, WARPS, 64], gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0]))
    steps = inputs._reinterpret(KIND, [STAGED, WARPS, 64], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
    whole.store(staged)
    gl.thread_barrier()
    acc = gl.zeros([WARPS, 16, 8], gl.float32, layout=MMA)
    for turn in range(TURNS):
        for i in gl.static_range(AHEAD):
            now = turn * AHEAD + i
            weights = weights_of(ring[i], ring_e[i // 4], i % 4, HALVES, A, [WARPS, 16, 64])
            x = _operand(steps.index(now).load(gl.SliceLayout(1, INPUTS)), INPUTS, B)
            acc = mma_v2(weights, x, acc)
            if TURNS > 1:
                new = gl.load(words + gl.minimum(first_w + now + AHEAD, STEPS - 1) * 128)
                ring = ring[:i] + (new,) + ring[i + 1 :]
                in_order(WARPS)
            if TURNS > 1 and i % 4 == 3:
                new_e = gl.load(powers + gl.minimum(first_p + (now + AHEAD) // 4, SPANS - 1) * 32)
                ring_e = ring_e[: i // 4] + (new_e,) + ring_e[i // 4 + 1 :]
    return acc


@gluon.jit
def _one_kernel(
    x_ptr: gl.tensor,
    words_ptr: gl.tensor,
    exponents_ptr: gl.tensor,
    scale_ptr: gl.tensor,
    bias_ptr: gl.tensor,
    down_words_ptr: gl.tensor,
    down_exponents_ptr: gl.tensor,
    down_scale_ptr: gl.tensor,
    down_bias_ptr: gl.tensor,
    chosen_ptr: gl.tensor,
    route_ptr: gl.tensor,
    logits_ptr: gl.tensor,
    inner_ptr: gl.tensor,
    out_ptr: gl.tensor,
    counter_ptr: gl.tensor,
    HIDDEN: gl.constexpr,
    WIDTH: gl.constexpr,
    EXPERTS: gl.constexpr,
    TOP_K: gl.constexpr,
    VISITS: gl.constexpr,
    SHARES: gl.constexpr,
    AHEAD: gl.constexpr,
    TURNS: gl.constexpr,
    DOWN_TURNS: gl.constexpr,
    STAGED: gl.constexpr,
    DOWN_STAGED: gl.constexpr,
    GATE: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    BIASED: gl.constexpr,
    RESIDUAL: gl.constexpr,
    CHOOSES: gl.constexpr,
    BLOCK_E: gl.constexpr,
    ADDED: gl.constexpr,
    SIGMOID: gl.constexpr,
    SCALE: gl.constexpr,
    PDL: gl.constexpr,
) -> None:
    """`VISITS`: of a token, as a power of two; in the first part as many tiles of gates and ups."""
    WARPS: gl.constexpr = VISITS * SHARES
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])
    WORDS: gl.constexpr = word_layout(WARPS, 1)
    POWERS: gl.constexpr = gl.SliceLayout(4, half_layout(WARPS, 1))
    WARP_W: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, WORDS)))
    WARP_P: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, POWERS)))
    WARP_S: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, MMA))
    ROW_TILES: gl.constexpr = (WIDTH + 7) // 8
    DOWN_TILES: gl.constexpr = (HIDDEN + 15) // 16
    STEPS: gl.constexpr = (HIDDEN + 63) // 64
    SPANS: gl.constexpr = (STEPS + 3) // 4
    DOWN_STEPS: gl.constexpr = (WIDTH + 63) // 64
    DOWN_SPANS: gl.constexpr = (DOWN_STEPS + 3) // 4
    SHARE: gl.constexpr = TURNS * AHEAD
    DOWN_SHARE: gl.constexpr = DOWN_TURNS * AHEAD
    KIND: gl.constexpr = x_ptr.dtype.element_ty
    ROOM: gl.constexpr = (STAGED if STAGED > DOWN_STAGED else DOWN_STAGED) * WARPS * 64
    inputs = gl.allocate_shared_memory(KIND, [ROOM], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    pid = gl.program_id(0)
    warp_w = gl.arange(0, WARPS, layout=WARP_W)
    warp_p = gl.arange(0, WARPS, layout=WARP_P)
    warp_s = gl.arange(0, WARPS, layout=WARP_S)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    staged = _read_inputs(x_ptr, 0, 1, HIDDEN, SHARES, SHARE, STAGED, WARPS)
    chosen = ()
    if CHOOSES:
        e, scores, places = ranked(logits_ptr, EXPERTS, BLOCK_E, WARPS)
        for i in gl.static_range(TOP_K):
            # Scores that are not numbers may choose no expert.
            chosen = chosen + (gl.minimum(gl.sum(gl.where(places == i, e, 0), axis=0), EXPERTS - 1),)  # type: ignore[assignment]
    else:
        for i in gl.static_range(TOP_K):
            chosen = chosen + (gl.maximum(gl.minimum(gl.load(chosen_ptr + i), EXPERTS - 1), 0),)  # type: ignore[assignment]
    # Gates and ups: every `SHARES` warps have a tile, of any visit.
    flat_w = gl.minimum(pid * VISITS + warp_w // SHARES, TOP_K * ROW_TILES - 1)
    flat_p = gl.minimum(pid * VISITS + warp_p // SHARES, TOP_K * ROW_TILES - 1)
    flat_s = gl.minimum(pid * VISITS + warp_s // SHARES, TOP_K * ROW_TILES - 1)
    tile_w = of_visit(chosen, flat_w // ROW_TILES, TOP_K).to(gl.int64) * ROW_TILES + flat_w % ROW_TILES
    tile_p = of_visit(chosen, flat_p // ROW_TILES, TOP_K).to(gl.int64) * ROW_TILES + flat_p % ROW_TILES
    words = at_words(words_ptr, tile_w * (STEPS * 128), WORDS)
    powers = at_powers(exponents_ptr, tile_p * (SPANS * 32), POWERS)
    first_w = (warp_w % SHARES * SHARE)[:, None, None, None]
    first_p = (warp_p % SHARES * (SHARE // 4))[:, None, None, None]
    ring, ring_e = _first_words(words, powers, first_w, first_p, pid >= 0, HIDDEN, AHEAD)
    place = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
    row, _ = rows_of((flat_s % ROW_TILES * 16)[:, None] + place[None, :], 2 * WIDTH, True)
    row += of_visit(chosen, flat_s // ROW_TILES, TOP_K)[:, None] * (2 * WIDTH)
    scale = gl.load(scale_ptr + row)
    if BIASED:
        bias = gl.where((warp_s % SHARES == 0)[:, None], gl.load(bias_ptr + row).to(gl.float32), 0.0)
    acc = _multiplied(
        inputs, staged, words, powers, first_w, first_p, ring, ring_e, HIDDEN, AHEAD, TURNS, STAGED, WARPS
    )
    # The second part's weights may be under way from here on.
    at_w = of_visit(chosen, gl.minimum(warp_w // SHARES, TOP_K - 1), TOP_K).to(gl.int64) * DOWN_TILES
    at_p = of_visit(chosen, gl.minimum(warp_p // SHARES, TOP_K - 1), TOP_K).to(gl.int64) * DOWN_TILES
    tile = gl.minimum(pid, DOWN_TILES - 1)
    words = at_words(down_words_ptr, (at_w + tile) * (DOWN_STEPS * 128), WORDS)
    powers = at_powers(down_exponents_ptr, (at_p + tile) * (DOWN_SPANS * 32), POWERS)
    first_w = (warp_w % SHARES * DOWN_SHARE)[:, None, None, None]
    first_p = (warp_p % SHARES * (DOWN_SHARE // 4))[:, None, None, None]
    ring, ring_e = _first_words(words, powers, first_w, first_p, pid < DOWN_TILES, WIDTH, AHEAD)
    acc *= gl.expand_dims(scale, 2)
    if BIASED:
        acc += gl.expand_dims(bias, 2)
    total = gl.sum(gl.reshape(acc, [VISITS, SHARES, 16, 8]), axis=1)
    gate, up = gl.split(gl.permute(gl.reshape(total, [VISITS, 2, 8, 8]), (0, 2, 3, 1)))
    y = gated(gate, up, GATE, ALPHA, LIMIT)
    team = gl.arange(0, VISITS, layout=gl.SliceLayout(1, gl.SliceLayout(2, y.type.layout)))
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, y.type.layout)))
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, y.type.layout)))
    flat = pid * VISITS + team
    n = (flat % ROW_TILES * 8)[:, None] + g[None, :]
    stored = (n < WIDTH) & (flat < TOP_K * ROW_TILES)[:, None]
    at = (flat // ROW_TILES * WIDTH)[:, None] + n
    mask = stored[:, :, None] & (column == 0)[None, None, :]
    gl.store(inner_ptr + at[:, :, None] + column[None, None, :], y.to(KIND), mask=mask)
    # All threads' stores happen before the barrier, and thread 0's release makes them visible to the chip.
    gl.thread_barrier()
    gl.atomic_add(counter_ptr, 1, sem="release", scope="gpu")
    if pid < DOWN_TILES:
        place = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
        out_row = gl.minimum(pid * 16 + place, HIDDEN - 1)
        visit = gl.minimum(warp_s // SHARES, TOP_K - 1)
        from_at = of_visit(chosen, visit, TOP_K)[:, None] * HIDDEN + out_row[None, :]
        out_scale = gl.load(down_scale_ptr + from_at)
        if BIASED:
            out_bias = gl.where((warp_s % SHARES == 0)[:, None], gl.load(down_bias_ptr + from_at).to(gl.float32), 0.0)
        if CHOOSES:
            p, whole = totals(scores, places, TOP_K, ADDED, SIGMOID)
            route = ()
            for i in gl.static_range(TOP_K):
                route = route + (gl.sum(gl.where(places == i, p, 0.0), axis=0) / whole * SCALE,)  # type: ignore[assignment]
            weight = of_visit(route, visit.to(gl.float32), TOP_K)
        else:
            weight = gl.load(route_ptr + visit)
        programs = gl.num_programs(0)
        while gl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu") < programs:
            pass
        gl.thread_barrier()
        gates = _read_inputs(inner_ptr, WIDTH, TOP_K, WIDTH, SHARES, DOWN_SHARE, DOWN_STAGED, WARPS)
        parts = _multiplied(
            inputs, gates, words, powers, first_w, first_p, ring, ring_e, WIDTH, AHEAD, DOWN_TURNS, DOWN_STAGED, WARPS
        )
        parts *= gl.expand_dims(out_scale, 2)
        if BIASED:
            parts += gl.expand_dims(out_bias, 2)
        parts *= weight[:, None, None]
        if VISITS > TOP_K:
            parts = gl.where((warp_s < TOP_K * SHARES)[:, None, None], parts, 0.0)
        sums = gl.sum(parts, axis=0)
        out_n = gl.arange(0, 16, layout=gl.SliceLayout(1, sums.type.layout)) + pid * 16
        out_column = gl.arange(0, 8, layout=gl.SliceLayout(0, sums.type.layout))
        in_out = (out_n < HIDDEN)[:, None] & (out_column == 0)[None, :]
        to = out_n[:, None] + out_column[None, :]
        if RESIDUAL:
            sums += gl.load(out_ptr + to, mask=in_out, other=0.0).to(gl.float32)
        gl.store(out_ptr + to, sums.to(KIND), mask=in_out)
        # The last to leave sets both counters back.
        if gl.atomic_add(counter_ptr + 1, 1, sem="relaxed", scope="gpu") == gl.minimum(programs, DOWN_TILES) - 1:
            gl.store(counter_ptr, 0)
            gl.store(counter_ptr + 1, 0)


def takes(x: Tensor, gate_up: Mxfp4Fragments, down: Mxfp4Fragments, visits: int) -> bool:
    """Whether this kernel multiplies by a token like `x`; `moe_mxfp4` multiplies by any."""
    if x.dtype != torch.bfloat16 or INTERPRETED.value:
        return False
    return _fits(x.device, _programs(gate_up, visits), visits, max(_staged(_turns(one)) for one in (gate_up, down)))


def _programs(stack: Mxfp4Fragments, visits: int) -> int:
    """Each has as many tiles of gates and ups as a token has visits, and all have one of the outputs at least."""
    return max(ceil_div(visits * stack.words.shape[1], next_power_of_2(visits)), ceil_div(stack.inputs, 16))


def _turns(stack: Mxfp4Fragments) -> int:
    """Of a warp over its share of the inputs."""
    return ceil_div(stack.exponents.shape[2], SHARES * (AHEAD // 4))


def _staged(turns: int) -> int:
    """Steps of inputs in shared memory, for each warp."""
    return next_power_of_2(turns * AHEAD)


@cache
def _fits(device: torch.device, programs: int, visits: int, staged: int) -> bool:
    """Whether all programs are there at once, by registers, shared memory and threads."""
    if shares_processors():
        return False
    processors, shared, threads = 132, 233472, 2048  # of an H200
    if device.type == "cuda":
        found: Any = torch.cuda.get_device_properties(device)
        if found.major < 9:
            return False  # without products of bfloat16
        processors, shared = found.multi_processor_count, found.shared_memory_per_multiprocessor
        threads = found.max_threads_per_multi_processor
    warps = next_power_of_2(visits) * SHARES
    if warps > 16:
        return False
    memory = warps * (staged * 128 + _SCRATCH) + _RESERVED
    return programs <= processors * min(65536 // (REGISTERS * 32 * warps), shared // memory, threads // (32 * warps))


def experts_of_one(
    x: Tensor,
    gate_up: Mxfp4Fragments,
    gate_up_bias: Tensor | None,
    down: Mxfp4Fragments,
    down_bias: Tensor | None,
    visits: Visits,
    activation: Activation,
    counters: Tensor,
    *,
    residual: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """The sum [1, hidden] of the experts that `x` [1, hidden] visits; `residual` is added to in place. Matrices of
    gates and ups are `paired`. `counters`: int32 [2 or more], zero, and zero again afterwards."""
    assert gate_up.paired and not down.paired and not visits.on_inputs
    assert (gate_up_bias is None) == (down_bias is None)
    experts, width, hidden = gate_up.scale.shape[0], gate_up.outputs // 2, gate_up.inputs
    choice = None if visits.logits is None else visits.choice
    out = torch.empty_like(x) if residual is None else residual
    turns, down_turns = _turns(gate_up), _turns(down)
    warps = next_power_of_2(visits.count) * SHARES
    launch(
        _one_kernel,
        (_programs(gate_up, visits.count),),
        x,
        *gate_up.tensors,
        x if gate_up_bias is None else gate_up_bias,
        *down.tensors,
        x if down_bias is None else down_bias,
        visits.chosen,
        visits.weights,
        x if visits.logits is None else visits.logits,
        torch.empty((visits.count, width), dtype=x.dtype, device=x.device),
        out,
        counters,
        HIDDEN=hidden,
        WIDTH=width,
        EXPERTS=experts,
        TOP_K=visits.count,
        VISITS=next_power_of_2(visits.count),
        SHARES=SHARES,
        AHEAD=AHEAD,
        TURNS=turns,
        DOWN_TURNS=down_turns,
        STAGED=_staged(turns),
        DOWN_STAGED=_staged(down_turns),
        **gate_options(activation),
        BIASED=gate_up_bias is not None,
        RESIDUAL=residual is not None,
        CHOOSES=choice is not None,
        BLOCK_E=next_power_of_2(experts),
        ADDED=None if choice is None else choice.added,
        SIGMOID=choice is not None and choice.sigmoid,
        SCALE=1.0 if choice is None else choice.scale,
        num_warps=warps,
        maxnreg=REGISTERS,
        pdl=pdl,
    )
    return out
