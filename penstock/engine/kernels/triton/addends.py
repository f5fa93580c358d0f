"""A linear's result in two parts, its own and what adapters add, computed side by side.

The operation that reads them adds them up, so that adding costs no launch. Tokens whose adapter does not touch the
linear, or that have none, have nothing in the second part: it is not read for them.
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
    slots: Tensor
    """int32 [T]: the adapter slot of each token; -1: none."""
    ranks: Tensor
    """int32 [slots]: the rank of each slot's adapter at this linear; a column of a table."""


def parts(x: Tensor | Addends) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], dict[str, int | bool]]:
    """For a launch: the plain tensor, the pointers of what is added, and its options."""
    if isinstance(x, Tensor):
        return x, (x, x, x), {"DELTA": False, "SITES": 0}
    return x.base, (x.delta, x.slots, x.ranks), {"DELTA": True, "SITES": x.ranks.stride(0)}


@triton.jit
def is_added(token: tl.tensor, slots_ptr: tl.tensor, ranks_ptr: tl.tensor, SITES: tl.constexpr) -> tl.tensor:
    """Whether a token has a second part."""
    slot = tl.load(slots_ptr + token)
    return tl.load(ranks_ptr + slot * SITES, mask=slot >= 0, other=0) > 0
