"""Token ids among the numbers that stages of a pipeline send each other: three digits to the base 256, of which a 256th
is exact in every type that residual streams have."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.models.stage_config import DIGITS


def digits_of(token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, DIGITS]."""
    shifts = torch.arange(DIGITS, device=token_ids.device) * 8
    return (token_ids.unsqueeze(1) >> shifts & 255).to(dtype) / 256


def ids_of(digits: Tensor) -> Tensor:
    """int64 [T]."""
    shifts = torch.arange(DIGITS, device=digits.device) * 8
    return ((digits.float() * 256).round().long() << shifts).sum(1)
