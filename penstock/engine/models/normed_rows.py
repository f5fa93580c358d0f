"""Embeddings that are normalized: a row is the same wherever its token stands, so that all are when they are read."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_AT_ONCE: Final = 1 << 24
"""Numbers that are widened together."""


def normed_rows(rows: Tensor, eps: float) -> Tensor:
    """Rows as tokens have them, normalized without weights; a new tensor. Computed on the host, so that rows of an
    adapter's file can be compared with those of a model on any device, bit by bit."""
    made = torch.empty_like(rows)
    step = max(1, _AT_ONCE // rows.shape[1])
    for begin in range(0, 0 if rows.is_meta else len(rows), step):
        wide = rows[begin : begin + step].cpu().float()
        made[begin : begin + step] = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return made
