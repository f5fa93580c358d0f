"""Experts all at once: routing, sorting tokens by expert, and one product over every expert's own tokens.

A token's visit to an expert is a pair; pair `t * top_k + i` is the i-th choice of token t. `plan` orders the pairs by
expert. A tile of the grouped product holds up to BLOCK_M pairs of one expert; which expert, a program works out from
where the experts' runs begin, so that the grid follows from host values alone and nothing waits for the device. The
first product gathers its rows from the tokens and leaves them in expert order; the second reads them in that order and
writes each to its pair; `combine` adds up the pairs of a token.
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
    is_building,
    launch,
    launch_successor,
    next_power_of_2,
    wait_for_inputs,
)
from penstock.engine.backends.interface import Activation

_GROUP = 8
"""Tiles that take turns at the same columns of weights, so that both stay in the L2 cache."""


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """Shape of the launch."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Pairs in order of their experts."""

    order: Tensor
    """int32 [pairs]: the pairs of expert 0, then those of expert 1, ..."""
    starts: Tensor
    """int32 [experts + 1]: where each expert's run begins."""


@triton.jit
def _route_kernel(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    stride: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    x = tl.load(logits_ptr + row * stride + e, mask=e < EXPERTS, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        p = 1.0 / (1.0 + tl.exp(-x))
        whole = 1.0
    else:
        p = tl.exp(x - tl.max(x, axis=0))
        whole = tl.sum(p, axis=0)
    choice = p
    BY_LOGIT: tl.constexpr = SIGMOID and not BIAS and GROUPS == 1
    if BY_LOGIT:
        choice = x  # sigmoids of large logits are all one
    if BIAS:
        # Scores and corrections are of one size: softmax scores must be what they are before they are corrected.
        choice = p / whole + tl.load(bias_ptr + e, mask=e < EXPERTS, other=0.0)
    left = tl.where(e < EXPERTS, choice, float("-inf"))
    if GROUPS > 1:
        of = e // (EXPERTS // GROUPS)
        g = tl.arange(0, GROUP_BLOCK)
        scores = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
        for group in tl.static_range(GROUPS):
            inside = tl.where(of == group, left, float("-inf"))
            score = tl.max(inside, axis=0)
            if BEST_TWO:
                score += tl.max(tl.where(e == tl.argmax(inside, axis=0), float("-inf"), inside), axis=0)
            scores = tl.where(g == group, score, scores)
        kept = e < 0
        for _ in tl.static_range(TOP_GROUPS):
            group = tl.argmax(scores, axis=0)
            kept = kept | (of == group)
            scores = tl.where(g == group, float("-inf"), scores)
        left = tl.where(kept & (e < EXPERTS), left, float("-inf"))
        p = tl.where(kept, p, 0.0)
    i = tl.arange(0, TOP_BLOCK)
    best = tl.zeros([TOP_BLOCK], tl.float32)
    chosen = tl.zeros([TOP_BLOCK], tl.int32)
    for turn in tl.static_range(TOP_K):
        expert = tl.argmax(left, axis=0)
        weight = tl.max(left, axis=0)
        if BIAS or GROUPS > 1 or BY_LOGIT:
            # Nothing is left in the groups: the rest are visits without weight.
            weight = tl.where(weight == float("-inf"), 0.0, tl.sum(tl.where(e == expert, p, 0.0), axis=0))
        best = tl.where(i == turn, weight, best)
        chosen = tl.where(i == turn, expert, chosen)
        left = tl.where(e == expert, float("-inf"), left)
    total = tl.sum(best, axis=0) if NORMALIZE else whole
    if SIGMOID and NORMALIZE:
        total += 1e-20
    tl.store(weights_ptr + row * TOP_K + i, best / total * SCALE, mask=i < TOP_K)
    tl.store(experts_ptr + row * TOP_K + i, chosen, mask=i < TOP_K)


def route(
    logits: Tensor,
    top_k: int,
    normalize: bool,
    *,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    best_two: bool = False,
    scale: float = 1.0,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Scores of [T, experts], the best `top_k` of each row: weights float32 and experts int32, [T, top_k] each. What
    else there is to routing is said at `models.layers.experts.Router`."""
    tokens, experts = logits.shape
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    if is_building():
        chosen.zero_()  # what comes next looks experts up, and nothing chooses any
    if tokens:
        launch(
            _route_kernel,
            (tokens,),
            logits,
            logits if bias is None else bias,
            weights,
            chosen,
            logits.stride(0),
            EXPERTS=experts,
            BLOCK=next_power_of_2(experts),
            TOP_K=top_k,
            TOP_BLOCK=next_power_of_2(top_k),
            NORMALIZE=normalize,
            SIGMOID=sigmoid,
            BIAS=bias is not None,
            GROUPS=groups,
            GROUP_BLOCK=next_power_of_2(groups),
            TOP_GROUPS=top_groups,
            BEST_TWO=best_two,
            SCALE=scale,
            num_warps=1 if experts <= 256 else 4,
            pdl=pdl,
        )
    return weights, chosen


@triton.jit(do_not_specialize=["pairs"])
def _plan_kernel(
    experts_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    pairs: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per expert: counts the pairs of those before it, then writes its own, in order."""
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    smaller = tl.zeros([BLOCK], tl.int32)
    for chunk in range(0, pairs, BLOCK):
        i = chunk + lane
        smaller += (tl.load(experts_ptr + i, mask=i < pairs, other=EXPERTS) < expert).to(tl.int32)
    at = tl.sum(smaller, axis=0)
    tl.store(starts_ptr + expert, at)
    for chunk in range(0, pairs, BLOCK):
        i = chunk + lane
        mine = tl.load(experts_ptr + i, mask=i < pairs, other=EXPERTS) == expert
        rank = tl.cumsum(mine.to(tl.int32), axis=0)
        tl.store(order_ptr + at + rank - 1, i, mask=mine)
        at += tl.sum(mine.to(tl.int32), axis=0)
    if expert == EXPERTS - 1:
        tl.store(starts_ptr + EXPERTS, at)


def plan(experts: Tensor, count: int, *, pdl: bool = False) -> Plan:
    """Sort the pairs of `experts` int32 [T, top_k] by expert; those of one expert keep their order. Choices of
    `count` or more are of experts elsewhere: they are in no run."""
    pairs = experts.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=experts.device)
    starts = torch.empty(count + 1, dtype=torch.int32, device=experts.device)
    block = min(4096, max(128, next_power_of_2(pairs)))
    launch(
        _plan_kernel,
        (count,),
        experts,
        order,
        starts,
        pairs,
        EXPERTS=count,
        BLOCK=block,
        num_warps=max(1, block // 512),
        pdl=pdl,
    )
    return Plan(order, starts)


@triton.jit(do_not_specialize=["tiles"])
def _grouped_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    route_ptr: tl.tensor,
    tiles: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SCALED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    first = pid // (GROUP * COLUMNS) * GROUP
    size = tl.minimum(tiles - first, GROUP)
    within = pid % (GROUP * COLUMNS)
    tile = first + within % size
    n = within // size * BLOCK_N + tl.arange(0, BLOCK_N)
    launch_successor(PDL)
    wait_for_inputs(PDL)

    # Whose tile this is: experts without tokens have none.
    e = tl.arange(0, EXPERT_BLOCK)
    begins = tl.load(starts_ptr + e, mask=e < EXPERTS, other=0)
    ends = tl.load(starts_ptr + e + 1, mask=e < EXPERTS, other=0)
    needed = (ends - begins + BLOCK_M - 1) // BLOCK_M
    upto = tl.cumsum(needed, axis=0)
    if tile >= tl.max(upto, axis=0):
        return
    expert = tl.sum(((upto <= tile) & (e < EXPERTS)).to(tl.int32), axis=0)
    mine = e == expert
    local = tile - tl.sum(tl.where(mine, upto - needed, 0), axis=0)
    m = tl.sum(tl.where(mine, begins, 0), axis=0) + local * BLOCK_M + tl.arange(0, BLOCK_M)
    in_m = m < tl.sum(tl.where(mine, ends, 0), axis=0)

    pair = tl.load(order_ptr + m, mask=in_m, other=0)
    source = pair // TOP_K if GATED else m
    k = tl.arange(0, BLOCK_K)
    rows = x_ptr + tl.where(in_m, source, 0).to(tl.int64)[:, None] * K + k[None, :]
    WIDE: tl.constexpr = 2 * N if GATED else N
    # Columns past the end read the last row of weights: their sums are not stored.
    at = expert.to(tl.int64) * WIDE + tl.minimum(n, N - 1)
    weights = weight_ptr + at[:, None] * K + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if TILE_COLUMNS:
        tiled = at // TILE_ROWS * (K // TILE_COLUMNS)
        up_tiled = (at + N) // TILE_ROWS * (K // TILE_COLUMNS)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K != 0:
            in_k = (start + k < K)[None, :]
            x = tl.load(rows + start, mask=in_k, other=0.0)
            w = tl.load(weights + start, mask=in_k, other=0.0)
        else:
            x = tl.load(rows + start)
            w = tl.load(weights + start)
        if TILE_COLUMNS:
            # One scale for a tile of the weights: sums over its inputs are scaled before they are added up.
            part = tl.dot(x, tl.trans(w.to(x.dtype)), input_precision=PRECISION)
            acc += part * tl.load(scale_ptr + tiled + start // TILE_COLUMNS)[None, :]
        else:
            acc = tl.dot(x, tl.trans(w.to(x.dtype)), acc, input_precision=PRECISION)
        if GATED:
            if K % BLOCK_K != 0:
                u = tl.load(weights + N * K + start, mask=(start + k < K)[None, :], other=0.0)
            else:
                u = tl.load(weights + N * K + start)
            if TILE_COLUMNS:
                part = tl.dot(x, tl.trans(u.to(x.dtype)), input_precision=PRECISION)
                up += part * tl.load(scale_ptr + up_tiled + start // TILE_COLUMNS)[None, :]
            else:
                up = tl.dot(x, tl.trans(u.to(x.dtype)), up, input_precision=PRECISION)
    if SCALED and not TILE_COLUMNS:
        acc *= tl.load(scale_ptr + at)[None, :]
        if GATED:
            up *= tl.load(scale_ptr + at + N)[None, :]
    if BIASED:
        acc += tl.load(bias_ptr + at).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + at + N).to(tl.float32)[None, :]
    if GATED:
        acc = gated(acc, up, GATE, ALPHA, LIMIT)
        target = m
    else:
        acc *= tl.load(route_ptr + pair, mask=in_m, other=0.0)[:, None]
        target = pair
    out = out_ptr + target.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=in_m[:, None] & (n < N)[None, :])


@triton.jit
def _combine_kernel(
    pairs_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    out_ptr: tl.tensor,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SOME: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    launch_successor(PDL)
    wait_for_inputs(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        present = mask
        if SOME:  # nothing was written for experts elsewhere
            present = mask & (tl.load(chosen_ptr + token * TOP_K + i) < EXPERTS)
        total += tl.load(pairs_ptr + (token * TOP_K + i) * HIDDEN + cols, mask=present, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + cols, total.to(out_ptr.dtype.element_ty), mask=mask)


def choose(pairs: int, experts: int, gated: bool, element_size: int) -> GroupedConfig:
    """Launch shape from host values: tiles as tall as an expert's share of tokens, if it were an equal one.

    Few tokens per expert: reading weights is all there is, so tiles are flat and deep. Many: arithmetic, so tiles are
    square; a gated program holds two products, hence half the columns.
    """
    if element_size == 4:  # ordinary arithmetic, which wants small tiles
        return GroupedConfig(block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=2)
    share = pairs / experts
    if share <= 16:
        return GroupedConfig(block_m=16, block_n=32 if gated else 64, block_k=128, num_warps=4, num_stages=4)
    if share <= 64:
        return GroupedConfig(block_m=64, block_n=64 if gated else 128, block_k=64, num_warps=4, num_stages=3)
    return GroupedConfig(block_m=128, block_n=64 if gated else 128, block_k=64, num_warps=8, num_stages=3)


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    schedule: Plan,
    top_k: int,
    *,
    weight_scale: Tensor | None = None,
    scale_tile: tuple[int, int] | None = None,
    bias: Tensor | None = None,
    route_weights: Tensor | None = None,
    activation: Activation = "silu",
    config: GroupedConfig | None = None,
    pdl: bool = False,
) -> Tensor:
    """Each pair's row times its expert's matrix, for all pairs in one launch.

    Without `route_weights`: `x` [T, K], `weight` [experts, 2 * N, K] (gate rows, then up rows), the result act(gate) *
    up [pairs, N] in expert order. With them (float32 [T, top_k]): `x` [pairs, K] in expert order, `weight` [experts, N,
    K], the result [pairs, N] by pair, each times its weight. `weight_scale`: float32, one per row of an e4m3 weight,
    or, with `scale_tile`, one for every so many rows and inputs: [experts, rows / tile, K / tile].
    `bias`: one per row of `weight`, added before gate and route weights.
    """
    gated = route_weights is None
    experts, wide, depth = weight.shape
    n, pairs = wide // 2 if gated else wide, schedule.order.numel()
    out = torch.empty((pairs, n), dtype=x.dtype, device=x.device)
    if pairs == 0:
        return out
    shape = config or choose(pairs, experts, gated, x.element_size())
    # Never more tiles than pairs, nor than full tiles plus one begun per expert.
    tiles = min(pairs, pairs // shape.block_m + experts)
    launch(
        _grouped_kernel,
        (tiles * ceil_div(n, shape.block_n),),
        x,
        weight,
        x if weight_scale is None else weight_scale,
        x if bias is None else bias,
        out,
        schedule.order,
        schedule.starts,
        x if route_weights is None else route_weights,
        tiles,
        N=n,
        K=depth,
        EXPERTS=experts,
        EXPERT_BLOCK=next_power_of_2(experts),
        TOP_K=top_k,
        GROUP=_GROUP,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_K=max(
            16, min(shape.block_k if scale_tile is None else scale_tile[1], shape.block_k, next_power_of_2(depth))
        ),
        GATED=gated,
        **gate_options(activation),
        SCALED=weight_scale is not None,
        TILE_ROWS=0 if scale_tile is None else scale_tile[0],
        TILE_COLUMNS=0 if scale_tile is None else scale_tile[1],
        BIASED=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        pdl=pdl,
    )
    return out


def combine(pairs: Tensor, top_k: int, *, chosen: Tensor | None = None, experts: int = 0, pdl: bool = False) -> Tensor:
    """[T * top_k, hidden] to [T, hidden]: the sum over each token's pairs; with `chosen`, of those whose expert is
    below `experts`."""
    tokens, hidden = pairs.shape[0] // top_k, pairs.shape[1]
    out = torch.empty((tokens, hidden), dtype=pairs.dtype, device=pairs.device)
    if tokens:
        block = min(1024, next_power_of_2(hidden))
        launch(
            _combine_kernel,
            (tokens, ceil_div(hidden, block)),
            pairs,
            pairs if chosen is None else chosen,
            out,
            HIDDEN=hidden,
            TOP_K=top_k,
            EXPERTS=experts,
            SOME=chosen is not None,
            BLOCK=block,
            num_warps=4,
            pdl=pdl,
        )
    return out
