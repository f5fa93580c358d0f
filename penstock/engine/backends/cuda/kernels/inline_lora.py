"""Adapters inside the launch of a linear of few tokens: each token's B(A x), while the weights stream past.

The products with A are there before, made by the launch that normalizes x (`norm_shrink`); or, where no norm stands
before the linear, the first programs of its grid make and publish them, while all others stream their own weight rows,
which takes longer. Those then multiply by B. No launch is added, and what follows the linear stays folded into it.

A published product is its own flag: its place holds `UNWRITTEN` until it is there, so no fence is needed, and a program
that finds it at the first look does not wait at all. Programs start in the order of their numbers, so the producers run
before the programs that wait for them. The places are cleared once per pass, when also the ranks of its tokens are
looked up, so that no program has to follow a pointer to a pointer (`open_pass`).

A single token is served by thousands of small programs, and a cache line answers about one request per nanosecond: read
by all of them, published products would take longer than the weights (measured: three times the step). So they are
published in many copies, and programs take turns among these. Products that were there before come from the L1 cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import (
    INTERPRETED,
    ceil_div,
    launch,
    launch_successor,
    wait_for_inputs,
)

UNWRITTEN = -1
"""The bits of a NaN; a product of these bits would be published as another NaN."""
RANKS = tl.constexpr(16)
"""Columns of B, and the products that meet them, taken at a time."""

COPIES = 64
"""Of the published products of a single token."""
TILE_ROWS = 16
"""Rows of A per program where several tokens are multiplied at once."""


@dataclass(frozen=True, slots=True)
class InlineLora:
    """The adapters of one linear in one pass."""

    bank: Tensor
    ranks: Tensor
    """int32 [tokens]: as stored, of each token's adapter at this linear; 0: nothing is added."""
    slots: Tensor
    """int32 [tokens]: the slot of each token; -1: no adapter."""
    sums: Tensor
    """int32 [tokens, parts * rank]: room for the products with A, all `UNWRITTEN`; for one token, `COPIES` of it."""
    start: int
    rank: int
    """A power of two, at least the rank of every adapter."""
    parts: int
    ends: tuple[int, int]
    """Where the first and the second part of the outputs end; multiples of `TILE_ROWS`."""
    inputs: int

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
        return self.bank, self.ranks, self.slots, self.sums, self.bank.stride(0), self.start

    @property
    def options(self) -> dict[str, int]:
        return {
            "R": self.rank,
            "PARTS": self.parts,
            "END_0": self.ends[0],
            "END_1": self.ends[1],
        }

    def shrinks(self, one: bool) -> int:
        """Programs that multiply by A: for a single token one per row, else per token and `TILE_ROWS` rows."""
        rows = self.parts * self.rank
        return rows if one else ceil_div(rows, TILE_ROWS)


@triton.jit
def _open_kernel(
    sums_ptr: tl.tensor,
    token_ranks_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    PLACES: tl.constexpr,
    TOKENS: tl.constexpr,
    MOST: tl.constexpr,
    SITES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    tl.store(sums_ptr + at, tl.full([BLOCK], -1, tl.int32), mask=at < PLACES)
    if program == 0:
        look_up_ranks(slots_ptr, ranks_ptr, token_ranks_ptr, TOKENS, MOST, SITES)


@triton.jit
def look_up_ranks(
    slots_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    token_ranks_ptr: tl.tensor,
    TOKENS: tl.constexpr,
    MOST: tl.constexpr,
    SITES: tl.constexpr,
) -> None:
    """The rank of every token's adapter at every site [sites, tokens]; 0 where there is none."""
    token = tl.arange(0, MOST)
    slot = tl.load(slots_ptr + token, mask=token < TOKENS, other=-1)
    for site in tl.static_range(SITES):
        rank = tl.load(ranks_ptr + slot * SITES + site, mask=slot >= 0, other=0)
        tl.store(token_ranks_ptr + site * TOKENS + token, rank, mask=token < TOKENS)


def open_pass(sums: Tensor, token_ranks: Tensor, slots: Tensor, ranks: Tensor, *, pdl: bool = False) -> None:
    """Clear `sums`; `token_ranks` [sites, tokens] from the slots of the tokens and `ranks` [slots, sites]. Linears read
    the ranks as if they were constants, before they wait for their inputs: so nothing starts before this has ended."""
    sites, tokens = token_ranks.shape
    launch(
        _open_kernel,
        (ceil_div(sums.numel(), 1024),),
        sums,
        token_ranks,
        slots,
        ranks,
        PLACES=sums.numel(),
        TOKENS=tokens,
        MOST=triton.next_power_of_2(tokens),
        SITES=sites,
        BLOCK=1024,
        num_warps=4,
        pdl=pdl,
        in_order=True,
    )


@triton.jit
def publish(at: tl.tensor, values: tl.tensor, mask: tl.tensor) -> None:
    bits = values.to(tl.int32, bitcast=True)
    tl.store(at, tl.where(bits == -1, 0x7FC00000, bits), mask=mask)


@triton.jit
def _arrived(at: tl.tensor, seen: tl.tensor) -> tl.tensor:
    """The products at `at`, of which `seen` was read earlier: waits for those that had not been written."""
    if INTERPRETED:  # programs run one after another: everything is there
        bits = tl.where(seen == -1, tl.load(at), seen)
    else:
        bits = tl.inline_asm_elementwise(
            """{
            .reg .pred there;
            mov.b32 $0, $2;
            look:
            setp.ne.s32 there, $0, -1;
            @there bra found;
            ld.relaxed.gpu.global.b32 $0, [$1];
            bra look;
            found:
            }""",
            "=&r,l,r",
            [at.to(tl.int64), seen],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def slots_and_ranks(
    slots_ptr: tl.tensor, ranks_ptr: tl.tensor, b: tl.tensor, batch: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Of each token; rank 0 where there is nothing to add."""
    slots = tl.load(slots_ptr + b, mask=b < batch, other=-1, eviction_policy="evict_last")
    ranks = tl.load(ranks_ptr + b, mask=b < batch, other=0, eviction_policy="evict_last")
    return slots, tl.multiple_of(ranks, 8)


@triton.jit
def part_of(column: tl.tensor, PARTS: tl.constexpr, END_0: tl.constexpr, END_1: tl.constexpr) -> tl.tensor:
    part = column * 0
    if PARTS > 1:
        part += (column >= END_0).to(tl.int32)
    if PARTS > 2:
        part += (column >= END_1).to(tl.int32)
    return part


@triton.jit
def up_rows(
    bank_ptr: tl.tensor,
    slots: tl.tensor,
    ranks: tl.tensor,
    n: tl.tensor,
    in_n: tl.tensor,
    slot_stride: tl.tensor,
    start: tl.tensor,
    FIRST: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """Columns FIRST .. FIRST + RANKS of B at outputs n, of each token's adapter: [batch, outputs, RANKS]."""
    r = FIRST + tl.arange(0, RANKS)
    begin = slots.to(tl.int64) * slot_stride + ranks.to(tl.int64) * (start + PARTS * K)
    at = begin[:, None, None] + (n[None, :] * ranks[:, None])[:, :, None] + r[None, None, :]
    mask = (r[None, :] < ranks[:, None])[:, None, :] & in_n[None, :, None]
    return tl.load(bank_ptr + at, mask=mask, other=0.0)


@triton.jit
def look(
    sums_ptr: tl.tensor,
    b: tl.tensor,
    ranks: tl.tensor,
    part: tl.tensor,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    READY: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Where the products that meet those columns of B lie [batch, RANKS], and what is there now."""
    r = FIRST + tl.arange(0, RANKS)
    at = sums_ptr + b[:, None] * WIDTH + part * ranks[:, None] + r[None, :]
    mask = r[None, :] < ranks[:, None]
    if READY:
        seen = tl.load(at, mask=mask, other=0, eviction_policy="evict_last")
    else:
        seen = tl.load(at, mask=mask, other=0, volatile=True)
    return at, seen


@triton.jit
def _times(rows: tl.tensor, at: tl.tensor, seen: tl.tensor, READY: tl.constexpr) -> tl.tensor:
    sums = seen.to(tl.float32, bitcast=True) if READY else _arrived(at, seen)
    return tl.sum(rows.to(tl.float32) * sums[:, None, :], axis=2)


@triton.jit
def expand(
    at: tl.tensor,
    seen: tl.tensor,
    rows: tl.tensor,
    bank_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    b: tl.tensor,
    slots: tl.tensor,
    ranks: tl.tensor,
    n: tl.tensor,
    in_n: tl.tensor,
    part: tl.tensor,
    slot_stride: tl.tensor,
    start: tl.tensor,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    READY: tl.constexpr,
) -> tl.tensor:
    """What adapters add [batch, outputs]: of `look` and `up_rows` for the first RANKS, the others are read here."""
    delta = _times(rows, at, seen, READY)
    if R > RANKS:
        most = tl.max(ranks, axis=0)
        for first in tl.static_range(RANKS, R, RANKS):
            if most > first:
                more = up_rows(bank_ptr, slots, ranks, n, in_n, slot_stride, start, first, K, PARTS)
                places, found = look(sums_ptr, b, ranks, part, first, PARTS * R, READY)
                delta += _times(more, places, found, READY)
    return delta


@triton.jit
def shrink_row(
    row: tl.tensor,
    x_ptr: tl.tensor,
    bank_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    slot_stride: tl.tensor,
    start: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    R: tl.constexpr,
    PARTS: tl.constexpr,
    REPLICAS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One row of A times the only token, published `REPLICAS` times."""
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    # More of the row in registers than this would leave room for fewer programs.
    EARLY: tl.constexpr = min(STEPS, 8)
    k = tl.arange(0, BLOCK_K)
    launch_successor(PDL)
    slot = tl.load(slots_ptr)
    rank = tl.load(ranks_ptr)
    inside = row < PARTS * rank
    a_ptr = bank_ptr + slot.to(tl.int64) * slot_stride + rank.to(tl.int64) * start + row * K
    matrix = ()
    for step in tl.static_range(EARLY):
        at = step * BLOCK_K + k
        a = tl.load(a_ptr + at, mask=(at < K) & inside, other=0.0, eviction_policy="evict_first")
        matrix = matrix + (a,)  # type: ignore[assignment]
    wait_for_inputs(PDL)
    acc = tl.zeros([BLOCK_K], tl.float32)
    for step in tl.static_range(EARLY):
        at = step * BLOCK_K + k
        x = tl.load(x_ptr + at, mask=at < K, other=0.0, eviction_policy="evict_last")
        acc += matrix[step].to(tl.float32) * x.to(tl.float32)
    for offset in range(EARLY * BLOCK_K, K, BLOCK_K):
        at = offset + k
        a = tl.load(a_ptr + at, mask=(at < K) & inside, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + at, mask=at < K, other=0.0, eviction_policy="evict_last")
        acc += a.to(tl.float32) * x.to(tl.float32)
    copies = tl.arange(0, REPLICAS)
    total = tl.sum(acc, axis=0) + tl.zeros([REPLICAS], tl.float32)
    publish(sums_ptr + copies * (PARTS * R) + row, total, (copies >= 0) & inside)


@triton.jit
def shrink_tile(
    program: tl.tensor,
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    batch: tl.tensor,
    slots: tl.tensor,
    ranks: tl.tensor,
    bank_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    slot_stride: tl.tensor,
    start: tl.tensor,
    K: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    R: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Rows of A of one token's adapter times all tokens that use it, if no earlier token does."""
    ROWS: tl.constexpr = 16
    BLOCKS: tl.constexpr = (PARTS * R + ROWS - 1) // ROWS
    launch_successor(PDL)
    wait_for_inputs(PDL)
    b = tl.arange(0, BATCH)
    k = tl.arange(0, BLOCK_K)
    token = program // BLOCKS
    slot = tl.sum(tl.where(b == token, slots, 0), axis=0)
    rank = tl.sum(tl.where(b == token, ranks, 0), axis=0)
    users = slots == slot
    leads = tl.min(tl.where(users, b, BATCH), axis=0) == token
    first = program % BLOCKS * ROWS
    if leads & (first < PARTS * rank):
        row = first + tl.arange(0, ROWS)
        begin = slot.to(tl.int64) * slot_stride + rank.to(tl.int64) * start
        rows = bank_ptr + begin + (tl.minimum(row, PARTS * rank - 1) * K)[:, None] + k[None, :]
        acc = tl.zeros([ROWS, BATCH], tl.float32)
        for offset in range(0, K, BLOCK_K):
            in_k = (offset + k < K)[None, :]
            a = tl.load(rows + offset, mask=in_k, other=0.0)
            x = tl.load(
                x_ptr + b[:, None] * x_stride + (offset + k)[None, :], mask=(b < batch)[:, None] & in_k, other=0.0
            )
            acc = tl.dot(a.to(x.dtype), tl.trans(x), acc, input_precision=PRECISION)
        publish(
            sums_ptr + b[None, :] * (PARTS * R) + row[:, None],
            acc,
            users[None, :] & (row < PARTS * rank)[:, None],
        )
