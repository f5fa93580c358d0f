"""Weights that a later kernel reads, brought into the L2 cache while this one leaves memory idle.

At one token memory has nothing to do while a kernel ends and the next begins, and while small kernels run (norms,
rotary embedding, attention over a short context). Whoever runs then asks for what is read next, and nobody waits for
it: the request is an instruction without a result, and a kernel is correct without it.

A kernel that asks takes what `Ahead.arguments` gives and calls `ask_ahead` once its inputs are there: then memory is
idle. Before, the kernel before still reads, and what is asked for takes its bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import INTERPRETED

PIECE = 4096
"""Bytes that one instruction asks for."""
_PIECE = tl.constexpr(PIECE)
HELPERS = 128
"""Programs that a launch of few gets for asking alone."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """Memory to ask for: `pieces` of `PIECE` bytes, each `step` bytes behind the one before. The first `half` begin at
    `start`, the others `stride` bytes behind that."""

    start: Tensor
    half: int
    pieces: int
    stride: int
    step: int

    @classmethod
    def of(cls, weight: Tensor, size: int, *, skip: int = 0, gated: bool = False, every: int = 1) -> Ahead | None:
        """`size` bytes of a contiguous matrix behind the first `skip`, in the order in which its product reads rows: of
        a `gated` one as many up rows as gate rows. One of `every` so many pieces, so that the product finds some in the
        cache and reads the others from memory meanwhile. None where that is nothing."""
        flat = weight.view(-1).view(torch.uint8)
        parts, step = 2 if gated else 1, every * PIECE
        whole, skip = flat.numel() // parts, every * skip // parts // PIECE * PIECE
        half = min(size // parts // PIECE, (whole - skip) // step)
        if half <= 0 or weight.data_ptr() % 16 or whole % 16:
            return None
        return cls(flat[skip:], half, half * parts, whole, step)

    @property
    def arguments(self) -> tuple[Tensor, int, int, int, int]:
        return self.start, self.half, self.pieces, self.stride, self.step


def arguments(ahead: Ahead | None, other: Tensor) -> tuple[Tensor, int, int, int, int]:
    """Those of `ahead`, or ones that are not looked at."""
    return (other, 0, 0, 0, 0) if ahead is None else ahead.arguments


@triton.jit
def ask(at: tl.tensor, size: tl.tensor, wanted: tl.tensor) -> None:
    """Bring `size` bytes at each `wanted` address into the L2 cache; addresses and sizes are multiples of 16. For as
    many elements as a program has threads, or more: of fewer, several threads have copies, and each would ask."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "{ .reg .pred wanted; setp.ne.b32 wanted, $3, 0; "
            "@wanted cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [at.to(tl.int64), size, wanted.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def ask_ahead(
    start_ptr: tl.tensor,
    half: tl.tensor,
    pieces: tl.tensor,
    stride: tl.tensor,
    step: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
    THREADS: tl.constexpr,
) -> None:
    """The share of program number `program` of `programs`; `THREADS` that it has, or more. Each thread asks for one
    piece at most: what is more than all of them together can have is left out."""
    piece = program + programs * tl.arange(0, THREADS)
    within = tl.where(piece < half, piece, piece - half).to(tl.int64) * step
    behind = within + tl.where(piece < half, 0, stride)
    ask(start_ptr + behind, tl.full([THREADS], _PIECE, tl.int32), piece < pieces)
