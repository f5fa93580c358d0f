"""Factors of queries that grow with the logarithm of their position, each head at a rate of its own (SSMax): softmaxes
over long contexts stay as sharp as those over short ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadScales:
    """The query of head h at position p is multiplied by rates[h] * log(p + 1) + offsets[h]."""

    rates: Tensor
    offsets: Tensor
    """float32 [heads]."""
    logarithms: Tensor
    """float32 [positions]; see `logarithms_of`."""

    def __call__(self, queries: Tensor, positions: Tensor) -> Tensor:
        """`queries` [T, heads * n], whose rows may lie apart."""
        factors = self.logarithms[positions].unsqueeze(1) * self.rates + self.offsets
        heads = queries.view(len(queries), len(self.rates), -1)
        return (heads * factors.unsqueeze(2)).to(queries.dtype).view(len(queries), -1)


@lru_cache(maxsize=2)
def logarithms_of(positions: int, device: torch.device) -> Tensor:
    """float32 [positions]: those of positions counted from one. All layers share them; looked up, they do not depend
    on how many tokens a step has."""
    return (torch.arange(positions) + 1).float().log().to(device)
