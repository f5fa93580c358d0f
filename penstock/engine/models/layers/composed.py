"""Linears made of linears: several whose weights cannot be stacked into one, and one behind a permutation.

Both also take the fused calls of steps of few tokens, in separate launches where they must.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.models.layers.linear import Linear


class _Fused(ABC):
    """`FusedLinear` by plain operations, around `__call__`."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...

    def fused(
        self,
        x: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor:
        if norm is not None:
            x = F.rms_norm(x, norm.shape, norm, eps)
        y = self(x)
        if gated:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        return y if residual is None else residual.add_(y)


class StackedLinear(_Fused):
    """Outputs of all parts, side by side."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)
        self.weight_bytes = sum(part.weight_bytes for part in parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


class PermutedLinear(_Fused):
    """Inputs taken in the order that the weight's columns are stored in."""

    def __init__(self, inner: Linear, order: Tensor) -> None:
        self.inner = inner
        self.order = order
        self.weight_bytes = inner.weight_bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(x.index_select(-1, self.order))
