"""Which pairs of token and expert a program of a product over experts works on.

A token's visit to an expert is a pair; pair `t * top_k + i` is the i-th choice of token t. `plan` orders the pairs by
expert, and `planned_tile` finds an expert and up to BLOCK_M of its pairs for a program. With few tokens no order is
made: `few_tile` looks through all choices. Grids follow from host values alone, and nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import launch, launch_successor, next_power_of_2, wait_for_inputs

GROUP = 8
"""Tiles that take turns at the same columns of weights, so that both stay in the L2 cache."""
FEW = 16
"""Tokens up to which no order is made: those that choose an expert fit into one tile."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Pairs in order of their experts."""

    order: Tensor
    """int32 [pairs]: the pairs of expert 0, then those of expert 1, ..."""
    starts: Tensor
    """int32 [experts + 1]: where each expert's run begins."""

    @property
    def pairs(self) -> int:
        return self.order.numel()

    def tiles(self, block_m: int) -> int:
        """Never more than pairs, nor than full tiles plus one begun per expert."""
        return min(self.pairs, self.pairs // block_m + self.starts.numel() - 1)

    @property
    def pointers(self) -> tuple[Tensor, Tensor]:
        return self.order, self.starts


@dataclass(frozen=True, slots=True)
class FewPairs:
    """The pairs of up to `FEW` tokens, in no order."""

    chosen: Tensor
    """int32 [T, top_k]: all of experts that are here, and different ones in a row."""

    @property
    def pairs(self) -> int:
        return self.chosen.numel()

    def tiles(self, block_m: int) -> int:
        """One for each pair; those whose expert an earlier pair has chosen are empty."""
        return self.pairs

    @property
    def pointers(self) -> tuple[Tensor, Tensor]:
        return self.chosen, self.chosen


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


@triton.jit
def place_of(pid: tl.tensor, tiles: tl.tensor, COLUMNS: tl.constexpr, GROUP: tl.constexpr) -> tuple[tl.tensor, ...]:
    """The tile and the block of columns of a program."""
    first = pid // (GROUP * COLUMNS) * GROUP
    size = tl.minimum(tiles - first, GROUP)
    within = pid % (GROUP * COLUMNS)
    return first + within % size, within // size


@triton.jit
def planned_tile(
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    tile: tl.tensor,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Whether the tile has pairs (experts without tokens have no tile), its expert, the places [BLOCK_M] in expert
    order, which of them exist, and their pairs."""
    e = tl.arange(0, EXPERT_BLOCK)
    begins = tl.load(starts_ptr + e, mask=e < EXPERTS, other=0)
    ends = tl.load(starts_ptr + e + 1, mask=e < EXPERTS, other=0)
    needed = (ends - begins + BLOCK_M - 1) // BLOCK_M
    upto = tl.cumsum(needed, axis=0)
    expert = tl.sum(((upto <= tile) & (e < EXPERTS)).to(tl.int32), axis=0)
    mine = e == expert
    local = tile - tl.sum(tl.where(mine, upto - needed, 0), axis=0)
    m = tl.sum(tl.where(mine, begins, 0), axis=0) + local * BLOCK_M + tl.arange(0, BLOCK_M)
    in_m = m < tl.sum(tl.where(mine, ends, 0), axis=0)
    pair = tl.load(order_ptr + m, mask=in_m, other=0)
    return tile < tl.max(upto, axis=0), expert, m, in_m, pair


@triton.jit
def few_tile(
    chosen_ptr: tl.tensor,
    slot: tl.tensor,
    pairs: tl.tensor,
    EXPERTS: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """As `planned_tile`, where places are pairs: all that have chosen the expert of pair `slot`, if it is the first of
    them; and how many there are. Scores that are not numbers may choose no expert, or one several times over: then the
    last, and more pairs than a tile holds."""
    p = tl.arange(0, PAIR_BLOCK)
    m = tl.arange(0, BLOCK_M)
    expert = tl.minimum(tl.load(chosen_ptr + slot), EXPERTS - 1)
    chosen = tl.minimum(tl.load(chosen_ptr + p, mask=p < pairs, other=0), EXPERTS - 1)
    same = (chosen == expert) & (p < pairs)
    rank = tl.cumsum(same.to(tl.int32), axis=0) - 1
    found = same[None, :] & (rank[None, :] == m[:, None])
    pair = tl.sum(tl.where(found, p[None, :], 0), axis=1)
    here = tl.sum(same.to(tl.int32), axis=0)
    return tl.min(tl.where(same, p, PAIR_BLOCK), axis=0) == slot, expert, pair, m < here, pair, here


@triton.jit
def add_up(
    acc: tl.tensor,
    pair: tl.tensor,
    in_m: tl.tensor,
    n: tl.tensor,
    block: tl.tensor,
    here: tl.tensor,
    pairs: tl.tensor,
    sums_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    SHARED: tl.constexpr = False,
) -> None:
    """Leave the sums `acc` [pairs of the tile, columns `n`] of `here` pairs; the last program at these columns adds up
    the pairs of every token, always in the order of its choices, and sets the counter back to zero. `SHARED`: behind
    the pairs there is one more for every token."""
    in_n = n < N
    tl.store(sums_ptr + pair[:, None] * N + n[None, :], acc, mask=in_m[:, None] & in_n[None, :])
    # All threads' stores happen before the barrier, and thread 0's release makes them visible to the chip.
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr + block, here, sem="acq_rel", scope="gpu")
    tokens = pairs // TOP_K
    if arrived + here == (pairs + tokens if SHARED else pairs):
        tl.store(counter_ptr + block, 0)
        t = tl.arange(0, TOKEN_BLOCK)
        mask = (t < tokens)[:, None] & in_n[None, :]
        total = tl.zeros([TOKEN_BLOCK, n.shape[0]], tl.float32)
        for i in tl.static_range(TOP_K):
            total += tl.load(sums_ptr + (t * TOP_K + i)[:, None] * N + n[None, :], mask=mask, other=0.0)
        if SHARED:
            total += tl.load(sums_ptr + (pairs + t)[:, None] * N + n[None, :], mask=mask, other=0.0)
        tl.store(out_ptr + t[:, None] * N + n[None, :], total.to(out_ptr.dtype.element_ty), mask=mask)
