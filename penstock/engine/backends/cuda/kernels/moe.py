"""One product over every expert's own tokens: the grouped product, and the sum over a token's experts.

Which pairs of token and expert a program works on, `moe_plan` says. The first product gathers its rows from the tokens
and leaves them in the order of the schedule; the second reads them in that order and writes each to its pair; `combine`
adds up the pairs of a token. With few tokens the second adds them up itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.activation import has_gate
from penstock.engine.backends.cuda.kernels.activation import SQUARED, gate_options, gated
from penstock.engine.backends.cuda.kernels.common import (
    ceil_div,
    launch,
    launch_successor,
    next_power_of_2,
    wait_for_inputs,
    widen,
)
from penstock.engine.backends.cuda.kernels.moe_plan import (
    FEW,
    GROUP,
    FewPairs,
    Plan,
    add_up,
    few_tile,
    place_of,
    planned_tile,
)
from penstock.engine.backends.interface import Activation


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """Shape of the launch."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class SharedPart:
    """An expert that every token visits, beside those of `FewPairs`; weights of the same form."""

    weight: Tensor
    """Of a gated product [2 * width, K], or [width, K] where there is no gate; of another [N, width]."""
    scale: Tensor | None
    """float32, one per row of an e4m3 weight."""
    rows: Tensor
    """[T, width]: what the gated product writes, and the other reads."""
    gate: Tensor | None
    """float32 [T]: what its outputs are multiplied by."""

    @property
    def width(self) -> int:
        return self.rows.shape[1]


@triton.jit
def _outputs(
    x_ptr: tl.tensor,
    source: tl.tensor,
    in_m: tl.tensor,
    route: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    first: tl.tensor,
    n: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SCALED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Rows `source` of x times the rows `n` of a matrix whose first is row `first`; gated, weighted on the inputs."""
    PAIRED: tl.constexpr = GATED and GATE != SQUARED
    k = tl.arange(0, BLOCK_K)
    rows = x_ptr + source.to(tl.int64)[:, None] * K + k[None, :]
    # Columns past the end read the last row of weights: their sums are not stored.
    at = first + tl.minimum(n, N - 1)
    weights = weight_ptr + at[:, None] * K + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if TILE_COLUMNS:
        tiled = at // TILE_ROWS * (K // TILE_COLUMNS)
        up_tiled = (at + N) // TILE_ROWS * (K // TILE_COLUMNS)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K != 0:
            in_k = (start + k < K)[None, :]
            x = tl.load(rows + start, mask=in_k & (in_m[:, None] | (BLOCK_M > 16)), other=0.0)
            w = tl.load(weights + start, mask=in_k, other=0.0)
        else:
            x = tl.load(rows + start, mask=in_m[:, None] | (BLOCK_M > 16), other=0.0)
            w = tl.load(weights + start)
        if WEIGHTED and GATED:
            x = (x.to(tl.float32) * route[:, None]).to(x.dtype)
        if TILE_COLUMNS:
            # One scale for a tile of the weights: sums over its inputs are scaled before they are added up.
            part = tl.dot(x, tl.trans(widen(w, x)), input_precision=PRECISION)
            acc += part * tl.load(scale_ptr + tiled + start // TILE_COLUMNS)[None, :]
        else:
            acc = tl.dot(x, tl.trans(widen(w, x)), acc, input_precision=PRECISION)
        if PAIRED:
            if K % BLOCK_K != 0:
                u = tl.load(weights + N * K + start, mask=(start + k < K)[None, :], other=0.0)
            else:
                u = tl.load(weights + N * K + start)
            if TILE_COLUMNS:
                part = tl.dot(x, tl.trans(widen(u, x)), input_precision=PRECISION)
                up += part * tl.load(scale_ptr + up_tiled + start // TILE_COLUMNS)[None, :]
            else:
                up = tl.dot(x, tl.trans(widen(u, x)), up, input_precision=PRECISION)
    if SCALED and not TILE_COLUMNS:
        acc *= tl.load(scale_ptr + at)[None, :]
        if PAIRED:
            up *= tl.load(scale_ptr + at + N)[None, :]
    if BIASED:
        acc += tl.load(bias_ptr + at).to(tl.float32)[None, :]
        if PAIRED:
            up += tl.load(bias_ptr + at + N).to(tl.float32)[None, :]
    if PAIRED:
        acc = gated(acc, up, GATE, ALPHA, LIMIT)
    elif GATED:
        acc = tl.maximum(acc, 0.0)
        acc *= acc
    return acc


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
    sums_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    shared_ptr: tl.tensor,
    shared_scale_ptr: tl.tensor,
    shared_rows_ptr: tl.tensor,
    shared_gate_ptr: tl.tensor,
    tiles: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SCALED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    BIASED: tl.constexpr,
    SHARED: tl.constexpr,
    SHARED_GATE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """`SHARED`: the width of the shared expert, or 0."""
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    if SHARED > 0:
        # The first programs are those of the shared expert.
        FIRST: tl.constexpr = (SHARED + BLOCK_N - 1) // BLOCK_N if GATED else COLUMNS
        if pid < FIRST:
            t = tl.arange(0, BLOCK_M)
            tokens = tiles // TOP_K
            columns = pid * BLOCK_N + tl.arange(0, BLOCK_N)
            if GATED:
                y = _outputs(
                    x_ptr, t, t < tokens, t, shared_ptr, shared_scale_ptr, bias_ptr, 0, columns, SHARED, K,
                    BLOCK_M, BLOCK_N, BLOCK_K, True, False, GATE, ALPHA, LIMIT, SCALED, 0, 0, False, PRECISION,
                )  # fmt: skip
                at = shared_rows_ptr + t[:, None] * SHARED + columns[None, :]
                tl.store(at, y.to(x_ptr.dtype.element_ty), mask=(t < tokens)[:, None] & (columns < SHARED)[None, :])
            else:
                y = _outputs(
                    shared_rows_ptr, t, t < tokens, t, shared_ptr, shared_scale_ptr, bias_ptr, 0, columns, N, SHARED,
                    BLOCK_M, BLOCK_N, BLOCK_K, False, False, GATE, ALPHA, LIMIT, SCALED, 0, 0, False, PRECISION,
                )  # fmt: skip
                if SHARED_GATE:
                    y *= tl.load(shared_gate_ptr + t, mask=t < tokens, other=0.0)[:, None]
                add_up(
                    y, tiles + t, t < tokens, columns, pid, tokens, tiles, sums_ptr, counter_ptr, out_ptr,
                    N, TOP_K, BLOCK_M, True,
                )  # fmt: skip
            return
        pid -= FIRST
    tile, block = place_of(pid, tiles, COLUMNS, GROUP)
    if PAIR_BLOCK > 0:
        present, expert, m, in_m, pair, here = few_tile(order_ptr, tile, tiles, EXPERTS, PAIR_BLOCK, BLOCK_M)
    else:
        present, expert, m, in_m, pair = planned_tile(order_ptr, starts_ptr, tile, EXPERTS, EXPERT_BLOCK, BLOCK_M)
    if not present:
        return
    route = m
    if WEIGHTED:
        route = tl.load(route_ptr + pair, mask=in_m, other=0.0)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = _outputs(
        x_ptr, pair // TOP_K if GATED else tl.where(in_m, m, 0), in_m, route, weight_ptr, scale_ptr, bias_ptr,
        expert.to(tl.int64) * (2 * N if GATED and GATE != SQUARED else N), n, N, K, BLOCK_M, BLOCK_N, BLOCK_K,
        GATED, WEIGHTED, GATE, ALPHA, LIMIT, SCALED, TILE_ROWS, TILE_COLUMNS, BIASED, PRECISION,
    )  # fmt: skip
    if WEIGHTED and not GATED:
        acc *= route[:, None]
    if PAIR_BLOCK > 0 and not GATED:
        add_up(acc, pair, in_m, n, block, here, tiles, sums_ptr, counter_ptr, out_ptr, N, TOP_K, BLOCK_M, SHARED > 0)
    else:
        out = out_ptr + (m if GATED else pair).to(tl.int64)[:, None] * N + n[None, :]
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


def choose(pairs: int, experts: int, gated: bool, element_size: int, few: bool = False) -> GroupedConfig:
    """Launch shape from host values: tiles as tall as an expert's share of tokens, if it were an equal one.

    Few tokens per expert: reading weights is all there is, so tiles are flat and deep. Many: arithmetic, so tiles are
    square; a gated program holds two products, hence half the columns.
    """
    if element_size == 4:  # ordinary arithmetic, which wants small tiles
        return GroupedConfig(block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=2)
    if few:  # enough programs for every multiprocessor to have several
        return GroupedConfig(block_m=FEW, block_n=16 if gated else 32, block_k=128, num_warps=2, num_stages=4)
    share = pairs / experts
    if share <= 16:
        return GroupedConfig(block_m=16, block_n=32 if gated else 64, block_k=128, num_warps=4, num_stages=4)
    if share <= 64:
        return GroupedConfig(block_m=64, block_n=64 if gated else 128, block_k=64, num_warps=4, num_stages=3)
    return GroupedConfig(block_m=128, block_n=64 if gated else 128, block_k=64, num_warps=8, num_stages=3)


def fixed(gated: bool, element_size: int) -> GroupedConfig:
    """The one launch shape of deterministic mode: how the inputs of a row are added up depends on nothing else."""
    return choose(1, 1, gated, element_size)


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    schedule: Plan | FewPairs,
    top_k: int,
    *,
    gated: bool,
    weight_scale: Tensor | None = None,
    scale_tile: tuple[int, int] | None = None,
    bias: Tensor | None = None,
    route_weights: Tensor | None = None,
    activation: Activation = "silu",
    counters: Tensor | None = None,
    shared: SharedPart | None = None,
    config: GroupedConfig | None = None,
    pdl: bool = False,
) -> Tensor:
    """Each pair's row times its expert's matrix, for all pairs in one launch.

    `gated`: `x` [T, K], `weight` [experts, 2 * N, K] (gate rows, then up rows), the result act(gate) * up [pairs, N] in
    the order of the schedule; for an activation without a gate `weight` is [experts, N, K], the result act(up).
    Otherwise `x` [pairs, K] in that order, `weight` [experts, N, K], the result [pairs, N] by pair; with `FewPairs`
    their sums [T, N], for which `counters` is int32, zero, one for every 16 columns.
    `route_weights` (float32 [T, top_k]) meet the inputs of a gated product and the outputs of another.
    `weight_scale`: float32, one per row of an e4m3 or int8 weight, or, with `scale_tile`, one for so many rows and
    inputs: [experts, rows / tile, K / tile]. `bias`: one per row of `weight`, added before gate and route weights.
    `shared`: with `FewPairs`, computed in the same launch and part of the sums.
    """
    experts, wide, depth = weight.shape
    paired = gated and has_gate(activation)
    n, pairs = wide // 2 if paired else wide, schedule.pairs
    few = isinstance(schedule, FewPairs)
    summed = few and not gated
    out = torch.empty((pairs // top_k if summed else pairs, n), dtype=x.dtype, device=x.device)
    if pairs == 0:
        return out
    shape = config or choose(pairs, experts, paired, x.element_size(), few)
    tiles = schedule.tiles(shape.block_m)
    programs = tiles * ceil_div(n, shape.block_n)
    rows = pairs
    if shared is not None:
        programs += ceil_div(shared.width if gated else n, shape.block_n)
        rows += pairs // top_k
    launch(
        _grouped_kernel,
        (programs,),
        x,
        weight,
        x if weight_scale is None else weight_scale,
        x if bias is None else bias,
        out,
        *schedule.pointers,
        x if route_weights is None else route_weights,
        torch.empty((rows, n), dtype=torch.float32, device=x.device) if summed else x,
        x if counters is None else counters,
        *((x, x, x, x) if shared is None else _pointers(shared)),
        tiles,
        N=n,
        K=depth,
        EXPERTS=experts,
        EXPERT_BLOCK=next_power_of_2(experts),
        PAIR_BLOCK=next_power_of_2(pairs) if few else 0,
        TOP_K=top_k,
        GROUP=GROUP,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_K=max(16, min(shape.block_k, _power_in(scale_tile), next_power_of_2(depth))),
        GATED=gated,
        WEIGHTED=route_weights is not None,
        **gate_options(activation),
        SCALED=weight_scale is not None,
        TILE_ROWS=0 if scale_tile is None else scale_tile[0],
        TILE_COLUMNS=0 if scale_tile is None else scale_tile[1],
        BIASED=bias is not None,
        SHARED=0 if shared is None else shared.width,
        SHARED_GATE=shared is not None and shared.gate is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        pdl=pdl,
    )
    return out


def _power_in(tile: tuple[int, int] | None) -> int:
    """The largest power of two that divides the inputs of a tile."""
    return 1 << 30 if tile is None else tile[1] & -tile[1]


def _pointers(shared: SharedPart) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = shared.rows
    return (
        shared.weight,
        rows if shared.scale is None else shared.scale,
        rows,
        rows if shared.gate is None else shared.gate,
    )


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
