"""Gains of norms that are those of each token's adapter, looked up by its slot inside the kernel of the norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

Gains = tuple[int, int]
"""A norm: which of all it is, and where its gains begin in a slot."""


@dataclass(frozen=True, slots=True)
class OwnGains:
    """For a launch with up to two norms."""

    bank: Tensor
    """float32 [slots, gains of all norms]"""
    held: Tensor
    """int32 [slots, norms]: whether a slot has gains for a norm."""
    slots: Tensor
    """int32 [T]; -1: none."""
    first: Gains | None
    """None: what the norm has is not replaced, or there is no such norm."""
    second: Gains | None


def own_arguments(own: OwnGains | None, unused: Tensor) -> tuple[list[Any], dict[str, bool]]:
    """For a launch: pointers and numbers in the order bank, held, token slots, gains, norms, first and its start,
    second and its start; and options."""
    if own is None:
        return [unused, unused, unused, 0, 0, 0, 0, 0, 0], {"OWN_FIRST": False, "OWN_SECOND": False}
    numbers = [*(own.first or (0, 0)), *(own.second or (0, 0))]
    options = {"OWN_FIRST": own.first is not None, "OWN_SECOND": own.second is not None}
    return [own.bank, own.held, own.slots, own.bank.shape[1], own.held.shape[1], *numbers], options


@triton.jit
def own_gains(
    weight: tl.tensor,
    bank_ptr: tl.tensor,
    held_ptr: tl.tensor,
    slot: tl.tensor,
    gains: tl.tensor,
    norms: tl.tensor,
    norm: tl.tensor,
    start: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
) -> tl.tensor:
    """`weight`, or what the adapter in `slot` has in its place, at elements `at` of the norm."""
    held = tl.load(held_ptr + slot * norms + norm, mask=slot >= 0, other=0)
    own = tl.load(bank_ptr + slot * gains + start + at, mask=mask & (held > 0), other=0.0)
    return tl.where(held > 0, own, weight)
