"""Weights that are read soon, asked for by kernels that leave the memory idle.

A step of one token is a chain of kernels, and those between the large products (attention, routing) read little. They
bring the next matrices into the L2 cache meanwhile. It is a hint alone: nothing depends on it. Programs ask once their
own inputs are there; before, the kernel in front of them still needs the memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import ask_for

PIECE = tl.constexpr(4096)
"""Bytes that are asked for at once."""
FEW = 8
"""Tokens of a step that reads ahead."""
MOST = 24 << 20
"""Bytes of a matrix that are asked for: more would push out what was asked for before."""


@triton.jit
def ask_for_next(
    first_ptr: tl.tensor,
    first_pieces: tl.tensor,
    second_ptr: tl.tensor,
    second_pieces: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
    PDL: tl.constexpr,
) -> None:
    """This program's share of two runs of bytes, in pieces; see `next_arguments`."""
    if PDL:
        _ask(first_ptr, first_pieces, program, programs, PDL)
        _ask(second_ptr, second_pieces, program, programs, PDL)


@triton.jit
def _ask(start_ptr: tl.tensor, pieces: tl.tensor, program: tl.tensor, programs: tl.tensor, PDL: tl.constexpr) -> None:
    share = tl.cdiv(pieces, programs)
    begin = program * share
    end = tl.minimum(begin + share, pieces)
    for first in range(begin, end, 32):
        # Those past the end ask for the last piece again, which a warp does once.
        piece = tl.minimum(first + tl.arange(0, 32), end - 1)
        ask_for(start_ptr + piece * PIECE, PIECE, PDL)


def next_arguments(ahead: tuple[Tensor, ...], tokens: int, other: Tensor) -> tuple[Tensor, int, Tensor, int]:
    """What `ask_for_next` wants of the first two matrices; `other` stands in where there are fewer. Of steps with more
    than a few tokens it is nothing: they leave no memory idle."""
    if tokens > FEW:
        ahead = ()
    none = other.view(torch.uint8)
    found: list[Tensor | int] = []
    for index in range(2):
        matrix = ahead[index] if index < len(ahead) else None
        found += [none, 0] if matrix is None else [matrix.view(torch.uint8), pieces(matrix)]
    return tuple(found)  # type: ignore[return-value]


def pieces(matrix: Tensor) -> int:
    return min(matrix.numel() * matrix.element_size(), MOST) // int(PIECE.value)
