"""Rounding a dense matrix to integers in groups: the grid, and round-to-nearest on it."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.loading.groups import IntGroups

SIZES = (128, 64, 32)
"""Group sizes, the preferred first."""


_PARTS = tuple(1 - step / 20 for step in range(1, 11))
"""Shares of a group's range to try besides all of it."""


def pick_group(inputs: int, wanted: int = SIZES[0]) -> int | None:
    """The largest group of at most `wanted` that divides the inputs; None when none does."""
    return next((size for size in SIZES if size <= wanted and inputs % size == 0), None)


def asymmetric_grid(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum [..., 1] of groups [..., size] in 4 bits, both exact in float16."""
    low = weight.amin(-1, keepdim=True).half().float()
    scale = ((weight.amax(-1, keepdim=True) - low) / 15).half().float()
    return scale, low


def round_int4(weight: Tensor, group: int) -> IntGroups:
    """Each group from its smallest to its largest value."""
    cut = weight.float().reshape(weight.shape[0], -1, group)
    scale, low = asymmetric_grid(cut)
    quants = ((cut - low) / scale.clamp(min=1e-30)).round_().clamp_(0, 15).to(torch.uint8)
    return IntGroups(quants.flatten(1), scale.squeeze(-1), low.squeeze(-1), 4)


def zero_point_grid(weight: Tensor, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scale and integer zero point [..., 1] of groups [..., size] in 4 bits, as GPTQ and AWQ checkpoints have them.

    The zero point is at least 1: stored less one, as GPTQ does, 0 would not be read alike everywhere.
    """
    if symmetric:
        scale = (weight.abs().amax(-1, keepdim=True) / 7.5).clamp(min=1e-6).half().float()
        return scale, torch.full_like(scale, 8)
    low, high = weight.amin(-1, keepdim=True).clamp(max=0), weight.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-6).half().float()
    return scale, (-low / scale).round_().clamp_(1, 15)


def round_zero_point(weight: Tensor, group: int, symmetric: bool = False) -> IntGroups:
    """Round to nearest on `zero_point_grid`."""
    cut = weight.float().reshape(weight.shape[0], -1, group)
    scale, zero = zero_point_grid(cut, symmetric)
    quants = ((cut / scale).round_() + zero).clamp_(0, 15).to(torch.uint8)
    return IntGroups(quants.flatten(1), scale.squeeze(-1), (-scale * zero).squeeze(-1), 4)


def searched_grid(cut: Tensor, inside: Tensor, symmetric: bool) -> tuple[Tensor, Tensor]:
    """`zero_point_grid` of groups [out, groups, size], each on the part of its range that changes the outputs least.

    Cutting off an outlier makes all other steps finer. `inside` [groups, size, size]: mean of x x^T of a
    group's inputs; other groups are ignored.
    """
    best, least = zero_point_grid(cut, symmetric), _change(cut, *zero_point_grid(cut, symmetric), inside)
    for part in _PARTS:
        scale, zero = zero_point_grid(cut * part, symmetric)
        loss = _change(cut, scale, zero, inside)
        better = loss < least
        least = torch.where(better, loss, least)
        best = torch.where(better, scale, best[0]), torch.where(better, zero, best[1])
    return best


def _change(cut: Tensor, scale: Tensor, zero: Tensor, inside: Tensor) -> Tensor:
    """How much rounding on a grid changes the outputs, by group [out, groups, 1]."""
    change = (((cut / scale).round_() + zero).clamp_(0, 15) - zero) * scale - cut
    moved = torch.bmm(change.transpose(0, 1), inside).transpose(0, 1)
    return (moved * change).sum(-1, keepdim=True)


def round_int8(weight: Tensor, group: int) -> IntGroups:
    """Each group by its largest magnitude. `group` may be the whole row."""
    cut = weight.float().reshape(weight.shape[0], -1, group)
    scale = (cut.abs().amax(-1, keepdim=True) / 127).half().float()
    quants = (cut / scale.clamp(min=1e-30)).round_().clamp_(-127, 127).to(torch.int8)
    return IntGroups(quants.flatten(1), scale.squeeze(-1), None, 8)
