"""GPTQ: rounding a matrix column by column, each column's error compensated by those that follow.

With H = X X^T of the inputs that calibration saw, the error a rounded column leaves in the outputs is least when the
columns not yet rounded move by it times a row of the inverse of H. One Cholesky factor of that inverse holds all the
rows that will be needed. Columns go in blocks, so that most of the moving is one matrix product per block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.loading.groups import IntGroups
from penstock.engine.quantization.grids import searched_grid
from penstock.errors import CheckpointError

_BLOCK = 128
_DAMPING = 0.01, 0.2
"""Least and most that is added to the diagonal, as a share of its mean."""


def gptq(
    weight: Tensor, hessian: Tensor, tokens: int, group: int, *, symmetric: bool = False, act_order: bool = False
) -> IntGroups:
    """`weight` [out, in] in 4 bits. `hessian`: mean of x x^T over so many `tokens`. `act_order`: columns with the
    largest inputs first, while all others can still compensate for them; groups then follow that order."""
    work, h = weight.float().clone(), hessian.float().clone()
    inputs = work.shape[1]
    dead = h.diagonal() <= 0
    h[dead, dead] = 1.0
    work[:, dead] = 0.0
    order = None
    if act_order:
        order = h.diagonal().argsort(descending=True, stable=True)
        work, h = work[:, order], h[order][:, order]
    factor = _inverse_factor(h, tokens)
    quants = torch.empty_like(work, dtype=torch.uint8)
    scales, zeros = [], []
    for begin in range(0, inputs, _BLOCK):
        end = min(begin + _BLOCK, inputs)
        columns = work[:, begin:end].T.contiguous()  # a column is a row here: contiguous
        errors = torch.empty_like(columns)
        for i in range(end - begin):
            if i % group == 0:
                # With all errors before it compensated, these are the values that the group is rounded from.
                span = slice(begin + i, begin + i + group)
                grid = searched_grid(columns[i : i + group].T.unsqueeze(1), h[None, span, span], symmetric)
                scale, zero = (part.flatten() for part in grid)
                scales.append(scale)
                zeros.append(zero)
            q = ((columns[i] / scale).round_() + zero).clamp_(0, 15)
            quants[:, begin + i] = q.to(torch.uint8)
            errors[i] = (columns[i] - (q - zero) * scale) / factor[begin + i, begin + i]
            columns[i + 1 :].addr_(factor[begin + i, begin + i + 1 : end], errors[i], alpha=-1)
        work[:, end:] -= errors.T @ factor[begin:end, end:]
    scale, zero = torch.stack(scales, dim=1), torch.stack(zeros, dim=1)
    return IntGroups(quants, scale, -scale * zero, 4, order)


def _inverse_factor(hessian: Tensor, tokens: int) -> Tensor:
    """The upper Cholesky factor of the inverse. The less text there was for the number of inputs, the more damping:
    correlations between inputs may be accidental, and absent in other text."""
    mean, (least, most) = hessian.diagonal().mean(), _DAMPING
    damping = min(most, max(least, 0.5 * len(hessian) / max(1, tokens)))
    for share in (damping, 1.0, 10.0):
        damped = hessian + torch.eye(len(hessian), device=hessian.device) * (share * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return upper
    raise CheckpointError("calibration gave no usable statistics: its activations are not finite, or all alike")
