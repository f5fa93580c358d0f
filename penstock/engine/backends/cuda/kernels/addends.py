"""A linear's result in two parts, its own and what adapters add, computed side by side.

The operation that reads them adds them up, so that adding costs no launch. Tokens without an adapter, or whose adapter
does not touch the linear, have no second part: its memory there is undefined. A token's experts leave several rows in
the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Addends:
    """Both [T, outputs]."""

    base: Tensor
    delta: Tensor
    ranks: Tensor
    """int32 [T]: the rank of each token's adapter at this linear; 0: it has no second part."""


@dataclass(frozen=True, slots=True)
class Summands:
    """What a token's experts gave, next to each other; the norm behind them adds them up."""

    rows: Tensor
    """[T * count, outputs]"""
    count: int


def parts(x: Tensor | Addends) -> tuple[Tensor, tuple[Tensor, Tensor], dict[str, bool]]:
    """For a launch: the plain tensor, the pointers of what is added, and its options."""
    if isinstance(x, Tensor):
        return x, (x, x), {"DELTA": False}
    return x.base, (x.delta, x.ranks), {"DELTA": True, "in_order": True}  # two streams meet here


@triton.jit
def second(at: tl.tensor, mask: tl.tensor, rank: tl.tensor) -> tl.tensor:
    """A piece of the second part; zeros where there is none. Read in any case: it need not wait for the rank."""
    delta = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return tl.where(rank > 0, delta, 0.0)
