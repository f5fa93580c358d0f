"""Adapters on what makes keys and values of latents (`kv_b_proj`), where that matrix is absorbed.

An adapter B A is added to the matrix. Queries then meet what A gives of the latents: a head's query goes through the
head's rows of B, backwards, and through A, backwards. What the head has seen goes through A and its rows of B. Both are
adapters of their own on every head, so a head is to `LoraKernel.add_visits` what an expert is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.adapters.kernel import LoraKernel
from penstock.engine.adapters.layout import PlacedSite


@dataclass(frozen=True, slots=True)
class AbsorbedAdapters:
    """The adapters of a layer's tokens; see `LatentAdditions`."""

    kernel: LoraKernel
    keys: PlacedSite
    values_site: PlacedSite

    def queries(self, plain: Tensor, made: Tensor) -> None:
        self._add(plain, made, self.keys)

    def values(self, seen: Tensor, made: Tensor) -> None:
        self._add(seen, made, self.values_site)

    def _add(self, x: Tensor, y: Tensor, placed: PlacedSite) -> None:
        tokens, heads = x.shape[0], x.shape[1]
        of = self.kernel.token_slots[:tokens]
        # Not `reshape`: of one token it would be a view of one number, and kernels read row by row.
        slots = of.unsqueeze(1).expand(-1, heads).contiguous().view(-1)
        numbers = torch.arange(heads, dtype=torch.int32, device=x.device).expand(tokens, -1).reshape(-1)
        # `y` may be the first part of longer rows; those of all heads are equally far apart.
        rows = y.as_strided((tokens * heads, y.shape[2]), (y.stride(1), 1))
        self.kernel.add_visits(x.reshape(tokens * heads, -1).contiguous(), rows, placed, slots, numbers)
