"""The grouped product of `moe` on experts whose weights are integers in groups, read as stored: W = scale * q +
minimum, q in 4 or 8 bits.

The arithmetic is that of `grouped`: for few tokens weight rows are the tall side of the tensor-core product and the
tokens of a tile the narrow one, and scales meet float32 sums of whole groups. For many tokens it is the other way
round: Hopper's tensor cores then read the weights, as numbers, from shared memory.
A gated product has gate and up rows in one tile, one behind the other.
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
from penstock.engine.backends.cuda.kernels.grouped import (
    GroupedWeight,
    group_sum,
    input_totals,
    nibble_bias,
    nibbles,
    split_factors,
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

_HALF = tl.constexpr(16)
_LEAST = 8
"""Groups of a program that shares its inputs with others, at least."""
_FLIGHT = 4096
"""Bytes of weights in a step of the copy pipeline of a program that only reads."""


@dataclass(frozen=True, slots=True)
class GroupsConfig:
    """Shape of the launch."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split: int = 1
    """Programs that share the inputs of a row, where the last program adds up the pairs."""

    def unroll(self, groups: int, row_bytes: int, rows: int) -> int:
        """Groups of a step."""
        most = 1 if self.block_m > FEW else max(1, min(8, _FLIGHT // (row_bytes * rows)))
        return next(count for count in range(most, 0, -1) if groups % count == 0)


@dataclass(frozen=True, slots=True)
class GroupsStack:
    """One matrix [out, in] of every expert, in the form of `GroupedWeight`."""

    data: Tensor
    """uint8 [experts, out, in / 2], or int8 [experts, out, in]."""
    factors: Tensor
    """int32 [experts, in / group, out]."""
    bits: int
    group: int
    has_minimum: bool
    columns: Tensor | None = None
    """int32 [experts, in]: the input of each column of an expert's matrix; None: they are in order."""

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, out, width = self.data.shape
        return experts, out, width * 8 // self.bits

    @property
    def nbytes(self) -> int:
        """Without `columns`."""
        return sum(part.numel() * part.element_size() for part in (self.data, self.factors))

    def put(self, index: int, weight: GroupedWeight, order: Tensor | None) -> None:
        """Another expert's matrix."""
        self.data[index].copy_((weight.in_8_bits() if self.bits == 8 else weight).data)
        self.factors[index].copy_(weight.factors_by(self.group))
        if self.columns is not None:
            inputs = torch.arange(self.shape[2], device=self.columns.device) if order is None else order
            self.columns[index].copy_(inputs)


def stacked(weights: list[GroupedWeight], orders: list[Tensor | None]) -> GroupsStack | None:
    """`orders`: the input of each column, None: in order. None where matrices differ in size; if only some have 4 bits,
    all have 8 then."""
    if len({weight.shape for weight in weights}) > 1:
        return None
    bits = max(weight.bits for weight in weights)
    first = weights[0].in_8_bits() if bits == 8 else weights[0]
    size = min(weight.group for weight in weights)
    (out, inputs), device = first.shape, first.data.device
    ordered = any(order is not None for order in orders)
    stack = GroupsStack(
        torch.empty((len(weights), *first.data.shape), dtype=first.data.dtype, device=device),
        torch.empty((len(weights), inputs // size, out), dtype=torch.int32, device=device),
        bits,
        size,
        any(weight.has_minimum for weight in weights),
        torch.empty((len(weights), inputs), dtype=torch.int32, device=device) if ordered else None,
    )
    for index, (weight, order) in enumerate(zip(weights, orders, strict=True)):
        stack.put(index, weight, order)
    return stack


@triton.jit
def _group_sum_by_token(
    acc: tl.tensor,
    weights: tl.tensor,
    scale: tl.tensor,
    minimum: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    total: tl.tensor,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """As `group_sum`, where `acc` is [tokens, rows]."""
    if BITS == 4:
        dot = tl.dot(low, tl.trans(nibbles(weights, False, low.dtype)), input_precision=PRECISION)
        dot = tl.dot(high, tl.trans(nibbles(weights, True, low.dtype)), dot, input_precision=PRECISION)
        acc += dot * scale[None, :] + total[:, None] * (minimum - scale * nibble_bias(low.dtype))[None, :]
    else:
        acc += tl.dot(low, tl.trans(widen(weights, low)), input_precision=PRECISION) * scale[None, :]
        if MINIMUM:
            acc += total[:, None] * minimum[None, :]
    return acc


@triton.jit(do_not_specialize=["tiles"])
def _groups_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    column_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    route_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    total_ptr: tl.tensor,
    tiles: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNROLL: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    COUNTED: tl.constexpr,
    MINIMUM: tl.constexpr,
    ORDERED: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    PAIRED: tl.constexpr = GATED and GATE != SQUARED
    WIDE: tl.constexpr = 2 * N if PAIRED else N
    ROWS: tl.constexpr = 2 * BLOCK_N if PAIRED else BLOCK_N
    BYTES: tl.constexpr = SIZE * BITS // 8
    PITCH: tl.constexpr = K * BITS // 8
    GROUPS: tl.constexpr = K // SIZE
    STEPS: tl.constexpr = GROUPS // UNROLL
    SHARE: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    # The sum of a group's inputs is wanted for a minimum, and to take back the bias of 4-bit weights.
    SUMS: tl.constexpr = MINIMUM or BITS == 4
    pid = tl.program_id(0)
    share = pid % SPLIT
    tile, block = place_of(pid // SPLIT, tiles, COLUMNS, GROUP)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    if PAIR_BLOCK > 0:
        present, expert, m, in_m, pair, here = few_tile(order_ptr, tile, tiles, EXPERTS, PAIR_BLOCK, BLOCK_M)
    else:
        present, expert, m, in_m, pair = planned_tile(order_ptr, starts_ptr, tile, EXPERTS, EXPERT_BLOCK, BLOCK_M)
    if not present:
        return
    source = pair // TOP_K if GATED else tl.where(in_m, m, 0)
    route = m
    if WEIGHTED:
        route = tl.load(route_ptr + pair, mask=in_m, other=0.0)
    j = tl.arange(0, BYTES)
    # The input of byte j's low half; that of its high half is 16 further.
    k = j // _HALF * 2 * _HALF + j % _HALF if BITS == 4 else j
    inputs = x_ptr + source.to(tl.int64)[:, None] * K
    # Gate rows, then up rows. Those past the end read the last one: their sums are not stored.
    r = tl.arange(0, ROWS)
    row = tl.minimum(block * BLOCK_N + r % BLOCK_N, N - 1) + r // BLOCK_N * N
    rows = weight_ptr + (expert.to(tl.int64) * WIDE + row)[:, None] * PITCH + j[None, :]
    factors = factor_ptr + expert.to(tl.int64) * (GROUPS * WIDE) + row
    columns = column_ptr + expert.to(tl.int64) * K + k
    totals = total_ptr + source.to(tl.int64) * GROUPS
    mask = in_m[:, None] | (BLOCK_M > 16)
    acc = tl.zeros([BLOCK_M, ROWS] if BY_TOKEN else [ROWS, BLOCK_M], tl.float32)
    for step in tl.range(share * SHARE, tl.minimum(share * SHARE + SHARE, STEPS), num_stages=STAGES):
        for u in tl.static_range(UNROLL):
            g = step * UNROLL + u
            if ORDERED:
                low = tl.load(inputs + tl.load(columns + g * SIZE)[None, :], mask=mask, other=0.0)
                high = low
                if BITS == 4:
                    high = tl.load(inputs + tl.load(columns + g * SIZE + _HALF)[None, :], mask=mask, other=0.0)
            else:
                low = tl.load(inputs + g * SIZE + k[None, :], mask=mask, other=0.0)
                high = low
                if BITS == 4:
                    high = tl.load(inputs + g * SIZE + _HALF + k[None, :], mask=mask, other=0.0)
            if WEIGHTED and GATED:
                low = (low.to(tl.float32) * route[:, None]).to(low.dtype)
                high = (high.to(tl.float32) * route[:, None]).to(high.dtype)
            weights = tl.load(rows + g * BYTES)
            scale, minimum = split_factors(tl.load(factors + g * WIDE))
            if BY_TOKEN:
                if COUNTED:
                    total = tl.load(totals + g)
                elif BITS == 4:
                    total = tl.sum(low.to(tl.float32) + high.to(tl.float32), axis=1)
                else:
                    total = tl.sum(low.to(tl.float32), axis=1)
                acc = _group_sum_by_token(acc, weights, scale, minimum, low, high, total, BITS, MINIMUM, PRECISION)
            else:
                total = input_totals(weights, low, high, BITS, PRECISION) if SUMS else acc
                acc = group_sum(acc, weights, scale, minimum, low, high, total, BITS, MINIMUM, PRECISION)
    if BIASED:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * WIDE + row).to(tl.float32)
        bias = tl.where(share == 0, bias, 0.0)
        acc += bias[None, :] if BY_TOKEN else bias[:, None]
    if PAIRED:
        if BY_TOKEN:
            gate, up = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, BLOCK_N]), [0, 2, 1]))
        else:
            gate, up = tl.split(tl.permute(tl.reshape(acc, [2, BLOCK_N, BLOCK_M]), [1, 2, 0]))
        acc = gated(gate, up, GATE, ALPHA, LIMIT)
    elif GATED:
        acc = tl.maximum(acc, 0.0)
        acc *= acc
    elif WEIGHTED:
        acc *= route[:, None] if BY_TOKEN else route[None, :]
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if PAIR_BLOCK > 0 and not GATED:
        tl.static_assert(not BY_TOKEN)
        add_up(
            tl.trans(acc), pair * SPLIT + share, in_m, n, block, here, tiles * SPLIT, sums_ptr, counter_ptr, out_ptr,
            N, TOP_K * SPLIT, BLOCK_M,
        )  # fmt: skip
    elif BY_TOKEN:
        out = out_ptr + (m if GATED else pair).to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=in_m[:, None] & (n < N)[None, :])
    else:
        out = out_ptr + (m if GATED else pair).to(tl.int64)[None, :] * N + n[:, None]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=in_m[None, :] & (n < N)[:, None])


def choose(pairs: int, experts: int, n: int, wide: bool, element_size: int, few: int = 0) -> GroupsConfig:
    """Launch shape from host values; see `moe.choose`. `wide`: with two products in a program. `few`: tokens, where
    there are few."""
    if element_size == 4:  # ordinary arithmetic, which wants small tiles
        return GroupsConfig(block_m=16, block_n=32, num_warps=4, num_stages=2)
    if few:
        programs = pairs * ceil_div(n, 16)
        # About sixteen warps for every multiprocessor of an H200; and no second turn of programs that is almost empty.
        split = 1 if wide else next(split for split in (1, 2, 4) if split * programs >= 2000 or split == 4)
        stages = 3 if wide and programs > 1500 else 4
        return GroupsConfig(8 if few <= 8 else FEW, 16, num_warps=2 if wide else 1, num_stages=stages, split=split)
    share = pairs / experts
    if share <= 8:
        return GroupsConfig(block_m=16, block_n=32 if wide else 64, num_warps=2, num_stages=4)
    if share <= 64:
        return GroupsConfig(64, 32 if wide else 64, num_warps=4, num_stages=3)
    return GroupsConfig(128, 64 if wide else 128, num_warps=8, num_stages=3)


def grouped_linear(
    x: Tensor,
    stack: GroupsStack,
    bias: Tensor | None,
    schedule: Plan | FewPairs,
    top_k: int,
    *,
    gated: bool,
    route_weights: Tensor | None = None,
    activation: Activation = "silu",
    counters: Tensor | None = None,
    config: GroupsConfig | None = None,
    pdl: bool = False,
) -> Tensor:
    """As `moe.grouped_linear`."""
    experts, outputs, depth = stack.shape
    paired = gated and has_gate(activation)
    n, pairs = outputs // 2 if paired else outputs, schedule.pairs
    few = len(schedule.chosen) if isinstance(schedule, FewPairs) else 0
    summed = few > 0 and not gated
    out = torch.empty((pairs // top_k if summed else pairs, n), dtype=x.dtype, device=x.device)
    if pairs == 0:
        return out
    shape = config or choose(pairs, experts, n, paired, x.element_size(), few)
    tiles = schedule.tiles(shape.block_m)
    split = min(shape.split, max(1, depth // stack.group // _LEAST)) if summed else 1
    by_token = shape.block_m > FEW
    # Where an expert has an order of its own, or tokens have weights, every program adds up its inputs itself.
    early = gated and route_weights is not None
    counted = by_token and (stack.has_minimum or stack.bits == 4) and stack.columns is None and not early
    rows = shape.block_n * (2 if paired else 1)
    launch(
        _groups_kernel,
        (tiles * ceil_div(n, shape.block_n) * split,),
        x,
        stack.data,
        stack.factors,
        stack.factors if stack.columns is None else stack.columns,
        x if bias is None else bias,
        out,
        *schedule.pointers,
        x if route_weights is None else route_weights,
        torch.empty((pairs * split, n), dtype=torch.float32, device=x.device) if summed else x,
        x if counters is None else counters,
        x.view(len(x), -1, stack.group).sum(-1, dtype=torch.float32) if counted else x,
        tiles,
        N=n,
        K=depth,
        SIZE=stack.group,
        BITS=stack.bits,
        EXPERTS=experts,
        EXPERT_BLOCK=next_power_of_2(experts),
        PAIR_BLOCK=next_power_of_2(pairs) if few else 0,
        TOP_K=top_k,
        GROUP=GROUP,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        UNROLL=shape.unroll(depth // stack.group, stack.group * stack.bits // 8, rows),
        SPLIT=split,
        STAGES=shape.num_stages,
        BY_TOKEN=by_token,
        COUNTED=counted,
        MINIMUM=stack.has_minimum,
        ORDERED=stack.columns is not None,
        GATED=gated,
        WEIGHTED=route_weights is not None,
        **gate_options(activation),
        BIASED=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        pdl=pdl,
    )
    return out
