"""AWQ: protecting the weights that meet large inputs, by scaling before rounding.

An input channel with large activations has its weights multiplied by s before they are rounded, and its activations
divided by s in what comes before (a norm, or the rows of a linear): the product is the same, but those weights take
more of the grid. How far to go is searched, the error measured on what calibration saw: with D the change of the
weights and H = X X^T of the inputs, the outputs change by trace(D H D^T). Then the range of each group is searched as
well: cutting off an outlier makes all other steps finer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.loading.groups import IntGroups
from penstock.engine.quantization.grids import round_zero_point, searched_grid

_RATIOS = 20
_JUDGED = 256
"""Rows, evenly spread, that are enough to judge a scale by."""


def search_scales(weight: Tensor, hessian: Tensor, magnitude: Tensor, group: int) -> Tensor:
    """Per input channel [in] of a matrix [out, in] (or several, stacked). `magnitude` [in]: mean |input|."""
    weight = weight[:: max(1, len(weight) // _JUDGED)]
    importance = magnitude.clamp(min=1e-6)
    best, least = torch.ones_like(importance), float("inf")
    for step in range(_RATIOS):
        scales = importance.pow(step / _RATIOS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        rounded = round_zero_point(weight * scales, group).dense() / scales
        loss = _loss(rounded - weight, hessian)
        if loss < least:
            best, least = scales, loss
    return best


def _loss(change: Tensor, hessian: Tensor) -> float:
    return float(((change @ hessian) * change).sum())


def round_clipped(weight: Tensor, hessian: Tensor, group: int) -> IntGroups:
    """In 4 bits, each group on the range that changes the outputs least; groups are taken one by one."""
    rows, inputs = weight.shape
    cut = weight.float().reshape(rows, -1, group)
    at = torch.arange(0, inputs, group, device=weight.device)
    inside = torch.stack([hessian[i : i + group, i : i + group] for i in at.tolist()])

    scale, zero = searched_grid(cut, inside, symmetric=False)
    quants = ((cut / scale).round_() + zero).clamp_(0, 15)
    return IntGroups(quants.to(torch.uint8).flatten(1), scale.squeeze(-1), (-scale * zero).squeeze(-1), 4)
