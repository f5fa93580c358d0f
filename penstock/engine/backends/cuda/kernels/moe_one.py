"""The experts of one token: reading the weights of those it visits is all there is, so programs own weight rows.

Two launches, with a shared expert in both. The first gates; it leaves one row with every visit's width, the shared
expert's last. In the second a program has its outputs of all visits, so it adds them up itself, and the residual.
Ordinary arithmetic with many wide loads in flight, as in `gemv`. What does not depend on the choice is under way
before its inputs are there; of what does, the second launch loads the first part too, by a guess that it checks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.activation import gate_options, gated
from penstock.engine.backends.cuda.kernels.common import (
    ceil_div,
    launch,
    launch_successor,
    next_power_of_2,
    wait_for_inputs,
)
from penstock.engine.backends.cuda.kernels.moe_route import Choice
from penstock.engine.backends.interface import Activation

MOST_RANKED = 32
"""Experts of which every program of `gate_up` finds the one it works on: with more that takes longer than a choice made
once, and the wait for it (of 64 experts, 4 us more a layer on an H200)."""
_REGISTERS = {1: 128, 2: 64}
"""Of a thread in programs of so many warps: what leaves room for 16 in a multiprocessor, so that the programs of 2,048
outputs are all there from the beginning."""


@dataclass(frozen=True, slots=True)
class OneConfig:
    """Shape of a launch: outputs of a program, and inputs per step, 8 for each thread: then the input and every weight
    row are laid out over the threads alike, and nothing moves between threads until the final sum."""

    block_n: int
    block_k: int
    num_warps: int
    loads: int = 6
    """Of a thread, 16 bytes each, that are under way at once; of rows that need more, as many as they need."""


@dataclass(frozen=True, slots=True)
class Visits:
    """What one token chose."""

    chosen: Tensor
    """int32 [1, top_k]"""
    weights: Tensor
    """float32 [1, top_k]"""
    on_inputs: bool
    """Whether the weights meet the inputs of the experts, not their outputs."""
    logits: Tensor | None = None
    """float32 [1, experts]: where `gate_up` is to make the choice, and to write it."""
    choice: Choice | None = None

    @property
    def count(self) -> int:
        return self.chosen.shape[1]


@dataclass(frozen=True, slots=True)
class Matrices:
    """One matrix of every expert, and that of the shared one; scales float32, one per row of e4m3 weights."""

    routed: Tensor
    scale: Tensor | None
    shared: Tensor | None = None
    shared_scale: Tensor | None = None


def ranks(choice: Choice, experts: int) -> bool:
    """Whether `gate_up` can make the choice itself."""
    return experts <= MOST_RANKED and choice.groups == 1 and choice.bias is None


@triton.jit
def _load_rows(rows: tl.tensor, end: tl.tensor, STEPS: tl.constexpr, BLOCK_K: tl.constexpr) -> tl.tensor:
    """`STEPS` steps of the weights at `rows` [BLOCK_N], zeros from `end` on."""
    found = ()
    for step in tl.static_range(STEPS):
        at = step * BLOCK_K + tl.arange(0, BLOCK_K)
        w = tl.load(rows[:, None] + at[None, :], mask=(at < end)[None, :], other=0.0, eviction_policy="evict_first")
        found = found + (w,)  # type: ignore[assignment]
    return found


@triton.jit
def _load_others(
    found: tl.tensor, rows: tl.tensor, wanted: tl.tensor, end: tl.tensor, STEPS: tl.constexpr, BLOCK_K: tl.constexpr
) -> tl.tensor:
    """What `_load_rows` has found, or where `wanted` the weights at `rows`."""
    loaded = ()
    for step in tl.static_range(STEPS):
        at = step * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = ((at < end) & wanted)[None, :]
        w = tl.load(rows[:, None] + at[None, :], mask=mask, other=found[step], eviction_policy="evict_first")
        loaded = loaded + (w,)  # type: ignore[assignment]
    return loaded


@triton.jit
def _times(
    found: tl.tensor, x_ptr: tl.tensor, end: tl.tensor, STEPS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Products of loaded rows and a vector, not added up yet: [BLOCK_N, BLOCK_K]."""
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for step in tl.static_range(STEPS):
        at = step * BLOCK_K + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + at, mask=at < end, other=0.0, eviction_policy="evict_last").to(tl.float32)
        acc += found[step].to(tl.float32) * x[None, :]
    return acc


@triton.jit
def _ranks(x: tl.tensor, logits_ptr: tl.tensor, EXPERTS: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """The place of every expert in the order of scores `x` [BLOCK]: the number of those before it."""
    e, other = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    y = tl.load(logits_ptr + other, mask=other < EXPERTS, other=float("-inf"))
    before = (y[None, :] > x[:, None]) | ((y[None, :] == x[:, None]) & (other[None, :] < e[:, None]))
    return tl.sum(before.to(tl.int32), axis=1)


@triton.jit
def _weight_at(
    place: tl.tensor, x: tl.tensor, ranks: tl.tensor, TOP_K: tl.constexpr, ADDED: tl.constexpr,
    SIGMOID: tl.constexpr, SCALE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The weight of the expert at `place`; see `moe_route`."""
    if SIGMOID:
        p = 1.0 / (1.0 + tl.exp(-x))
        total = 1.0
    else:
        p = tl.exp(x - tl.max(x, axis=0))
        total = tl.sum(p, axis=0)
    if ADDED is not None:
        total = tl.sum(tl.where(ranks < TOP_K, p, 0.0), axis=0) + ADDED
    return tl.sum(tl.where(ranks == place, p, 0.0), axis=0) / total * SCALE


@triton.jit
def _gate_up_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    route_ptr: tl.tensor,
    shared_ptr: tl.tensor,
    shared_scale_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    out_ptr: tl.tensor,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHOOSES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ADDED: tl.constexpr,
    SIGMOID: tl.constexpr,
    SCALE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SCALED: tl.constexpr,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """`SHARED`: the width of the shared expert, whose programs are the first, or 0."""
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    FIRST: tl.constexpr = (SHARED + BLOCK_N - 1) // BLOCK_N
    BLOCKS: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK_N)
    kind = out_ptr.dtype.element_ty
    if SHARED > 0:  # noqa: SIM102 - known when compiled; the other is not
        if pid < FIRST:
            n = pid * BLOCK_N + i
            # Rows past the end read the last row: their sums are not stored.
            row = tl.minimum(n, SHARED - 1)
            # Weights are constants: they may be under way before the input is there.
            gates = _load_rows(shared_ptr + row * K, K, STEPS, BLOCK_K)
            ups = _load_rows(shared_ptr + (row + SHARED) * K, K, STEPS, BLOCK_K)
            wait_for_inputs(PDL)
            launch_successor(PDL)
            gate = tl.sum(_times(gates, x_ptr, K, STEPS, BLOCK_N, BLOCK_K), axis=1)
            up = tl.sum(_times(ups, x_ptr, K, STEPS, BLOCK_N, BLOCK_K), axis=1)
            if SCALED:
                gate *= tl.load(shared_scale_ptr + row)
                up *= tl.load(shared_scale_ptr + row + SHARED)
            y = gated(gate, up, GATE, ALPHA, LIMIT)
            tl.store(out_ptr + TOP_K * WIDTH + n, y.to(kind), mask=n < SHARED)
            return
    visit = (pid - FIRST) // BLOCKS
    n = (pid - FIRST) % BLOCKS * BLOCK_N + i
    wait_for_inputs(PDL)
    # Only now: what comes next looks the choices up as soon as it starts, to guess what to load.
    launch_successor(PDL)
    if CHOOSES:
        e = tl.arange(0, BLOCK_E)
        scores = tl.load(logits_ptr + e, mask=e < EXPERTS, other=float("-inf"))
        ranks = _ranks(scores, logits_ptr, EXPERTS, BLOCK_E)
        expert = tl.sum(tl.where(ranks == visit, e, 0), axis=0)
    else:
        expert = tl.load(chosen_ptr + visit)
    # Scores that are not numbers may choose no expert.
    expert = tl.minimum(expert, EXPERTS - 1).to(tl.int64)
    row = expert * (2 * WIDTH) + tl.minimum(n, WIDTH - 1)
    gates = _load_rows(weight_ptr + row * K, K, STEPS, BLOCK_K)
    ups = _load_rows(weight_ptr + (row + WIDTH) * K, K, STEPS, BLOCK_K)
    if CHOOSES:  # noqa: SIM102
        if (pid - FIRST) % BLOCKS == 0:
            # For what comes next.
            tl.store(chosen_ptr + visit, expert.to(tl.int32))
            tl.store(route_ptr + visit, _weight_at(visit, scores, ranks, TOP_K, ADDED, SIGMOID, SCALE))
    gate = tl.sum(_times(gates, x_ptr, K, STEPS, BLOCK_N, BLOCK_K), axis=1)
    up = tl.sum(_times(ups, x_ptr, K, STEPS, BLOCK_N, BLOCK_K), axis=1)
    if SCALED:
        gate *= tl.load(scale_ptr + row)
        up *= tl.load(scale_ptr + row + WIDTH)
    if WEIGHTED:
        if CHOOSES:
            weight = _weight_at(visit, scores, ranks, TOP_K, ADDED, SIGMOID, SCALE)
        else:
            weight = tl.load(route_ptr + visit)
        gate *= weight
        up *= weight
    y = gated(gate, up, GATE, ALPHA, LIMIT)
    tl.store(out_ptr + visit * WIDTH + n, y.to(kind), mask=n < WIDTH)


@triton.jit
def _down_kernel(
    inner_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    route_ptr: tl.tensor,
    shared_ptr: tl.tensor,
    shared_scale_ptr: tl.tensor,
    shared_gate_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    VISITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SCALED: tl.constexpr,
    SHARED_GATE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    STEPS: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1)
    launch_successor(PDL)
    # The first visits are loaded before the inputs are there: programs start when the last of the launch before have,
    # so the choices are almost always known. Whether they were is looked up behind the wait.
    guessed = ()
    for i in tl.static_range(VISITS):
        guess = tl.load(chosen_ptr + i, cache_modifier=".cg")
        guess = tl.maximum(tl.minimum(guess, EXPERTS - 1), 0)
        early = _load_rows(weight_ptr + (guess.to(tl.int64) * N + row) * WIDTH, WIDTH, STEPS, BLOCK_K)
        guessed = guessed + ((guess, early),)  # type: ignore[assignment]
    wait_for_inputs(PDL)
    # A loop, not all at once: with few registers all programs are there from the beginning, and what they ask for keeps
    # the memory busy.
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for i in tl.static_range(VISITS):
        guess, loaded = guessed[i]  # type: ignore[var-annotated]
        taken = tl.maximum(tl.minimum(tl.load(chosen_ptr + i), EXPERTS - 1), 0)
        at = taken.to(tl.int64) * N + row
        loaded = _load_others(loaded, weight_ptr + at * WIDTH, taken != guess, WIDTH, STEPS, BLOCK_K)
        share = tl.full([BLOCK_N], 1.0, tl.float32)
        if WEIGHTED:
            share *= tl.load(route_ptr + i)
        if SCALED:
            share *= tl.load(scale_ptr + at)
        total += _times(loaded, inner_ptr + i * WIDTH, WIDTH, STEPS, BLOCK_N, BLOCK_K) * share[:, None]
    for first in range(VISITS, TOP_K, VISITS):
        rows = ()
        for i in tl.static_range(VISITS):
            visit = tl.minimum(first + i, TOP_K - 1)
            end = tl.where(first + i < TOP_K, WIDTH, 0) if TOP_K % VISITS else WIDTH
            # Scores that are not numbers may choose no expert.
            expert = tl.minimum(tl.load(chosen_ptr + visit), EXPERTS - 1).to(tl.int64)
            found = _load_rows(weight_ptr + (expert * N + row) * WIDTH, end, STEPS, BLOCK_K)
            factor = tl.full([BLOCK_N], 1.0, tl.float32)
            if WEIGHTED:
                factor *= tl.load(route_ptr + visit)
            if SCALED:
                factor *= tl.load(scale_ptr + expert * N + row)
            rows = rows + ((found, visit, end, factor),)  # type: ignore[assignment]
        for i in tl.static_range(VISITS):
            found, visit, end, factor = rows[i]
            total += _times(found, inner_ptr + visit * WIDTH, end, STEPS, BLOCK_N, BLOCK_K) * factor[:, None]
    if SHARED > 0:
        factor = tl.full([BLOCK_N], 1.0, tl.float32)
        if SHARED_GATE:
            factor *= tl.load(shared_gate_ptr)
        if SCALED:
            factor *= tl.load(shared_scale_ptr + row)
        part = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for begin in range(0, SHARED, STEPS * BLOCK_K):
            found = _load_rows(shared_ptr + row * SHARED + begin, SHARED - begin, STEPS, BLOCK_K)
            part += _times(found, inner_ptr + TOP_K * WIDTH + begin, SHARED - begin, STEPS, BLOCK_N, BLOCK_K)
        total += part * factor[:, None]
    y = tl.sum(total, axis=1)
    if RESIDUAL:
        y += tl.load(residual_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=n < N)


def gate_up(
    x: Tensor,
    matrices: Matrices,
    visits: Visits,
    activation: Activation,
    *,
    config: OneConfig | None = None,
    pdl: bool = False,
) -> Tensor:
    """act(gate) * up of `x` [1, K] by the experts it visits, then by the shared one: [visits * width + shared width].
    Matrices are [experts, 2 * width, K] and [2 * shared width, K], gate rows and then up rows."""
    experts, wide, depth = matrices.routed.shape
    width, shared = wide // 2, 0 if matrices.shared is None else matrices.shared.shape[0] // 2
    shape = config or _gate_up_shape(depth, shared)
    choice = None if visits.logits is None else visits.choice
    out = torch.empty(visits.count * width + shared, dtype=x.dtype, device=x.device)
    launch(
        _gate_up_kernel,
        (ceil_div(shared, shape.block_n) + visits.count * ceil_div(width, shape.block_n),),
        x,
        matrices.routed,
        x if matrices.scale is None else matrices.scale,
        visits.chosen,
        visits.weights,
        x if matrices.shared is None else matrices.shared,
        x if matrices.shared_scale is None else matrices.shared_scale,
        x if visits.logits is None else visits.logits,
        out,
        K=depth,
        WIDTH=width,
        SHARED=shared,
        EXPERTS=experts,
        TOP_K=visits.count,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        CHOOSES=choice is not None,
        BLOCK_E=next_power_of_2(experts),
        ADDED=None if choice is None else choice.added,
        SIGMOID=choice is not None and choice.sigmoid,
        SCALE=1.0 if choice is None else choice.scale,
        WEIGHTED=visits.on_inputs,
        SCALED=matrices.scale is not None,
        **gate_options(activation),
        num_warps=shape.num_warps,
        pdl=pdl,
    )
    return out


def down(
    inner: Tensor,
    matrices: Matrices,
    visits: Visits,
    *,
    shared_gate: Tensor | None = None,
    residual: Tensor | None = None,
    config: OneConfig | None = None,
    pdl: bool = False,
) -> Tensor:
    """The sum [1, N] over what `gate_up` left, times matrices [experts, N, width] and [N, shared width]. The shared
    expert's part is multiplied by `shared_gate` (float32 [1]); `residual` [1, N] is added to in place."""
    experts, n, width = matrices.routed.shape
    shared = 0 if matrices.shared is None else matrices.shared.shape[1]
    shape = config or _down_shape(width)
    out = residual if residual is not None else torch.empty((1, n), dtype=inner.dtype, device=inner.device)
    launch(
        _down_kernel,
        (ceil_div(n, shape.block_n),),
        inner,
        matrices.routed,
        inner if matrices.scale is None else matrices.scale,
        visits.chosen,
        visits.weights,
        inner if matrices.shared is None else matrices.shared,
        inner if matrices.shared_scale is None else matrices.shared_scale,
        inner if shared_gate is None else shared_gate,
        out,
        out,
        N=n,
        WIDTH=width,
        SHARED=shared,
        EXPERTS=experts,
        TOP_K=visits.count,
        VISITS=_visits_at_once(visits.count, shape.loads // ceil_div(width, shape.block_k)),
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        WEIGHTED=not visits.on_inputs,
        SCALED=matrices.scale is not None,
        SHARED_GATE=shared_gate is not None,
        RESIDUAL=residual is not None,
        num_warps=shape.num_warps,
        maxnreg=_REGISTERS.get(shape.num_warps),
        pdl=pdl,
    )
    return out


def _gate_up_shape(depth: int, shared: int) -> OneConfig:
    """All loads of a program are under way at once: at most 16 for a thread, in rows of gate and as many of up; 8 for
    short rows where all programs wait for the choice."""
    warps = max(1, min(4, next_power_of_2(depth) // 256))
    steps = ceil_div(depth, warps * 256)
    pairs = 8 if shared or depth > 2048 else 4
    return OneConfig(block_n=max(1, min(4, pairs // steps)), block_k=warps * 256, num_warps=warps)


def _down_shape(width: int) -> OneConfig:
    """Rows are short and of odd lengths: steps that leave the fewest threads without work, the longest of those; for
    the shortest rows a single warp."""
    fits = [step for step in (2048, 1024, 512, 256) if ceil_div(width, step) <= 8] or [2048]
    if width <= 512:
        fits = [256]
    block_k = min(fits, key=lambda step: (ceil_div(width, step) * step, -step))
    return OneConfig(block_n=1, block_k=block_k, num_warps=block_k // 256, loads=9 if block_k == 256 else 6)


def _visits_at_once(visits: int, most: int) -> int:
    """At most `most`, and no more in the first turns than in the last."""
    return ceil_div(visits, ceil_div(visits, max(1, most)))
