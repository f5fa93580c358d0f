"""Several residual streams that are read through gates (Qwen4).

A part of a layer reads the mean of the normalized streams, each number weighted by a gate that is computed from all
streams through a narrow product. What it gives is added to every stream, with a factor for each that is computed
likewise. Streams are not mixed with each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.models.layers.linear import Linear


def grouped_norm(x: Tensor, weight: Tensor, size: int, eps: float) -> Tensor:
    """float32: each run of `size` numbers of `x` [T, n * size] normalized by itself; `weight` [n * size]."""
    wide = x.float().view(len(x), -1, size)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.flatten(1) * weight


def by_token(function: Callable[..., Tensor], *rows: Tensor, alone: bool) -> Tensor:
    """What `function` gives of tokens, one row each; `alone`: every token by itself, since PyTorch rounds the numbers
    of a row otherwise where there are other rows."""
    if not alone or len(rows[0]) <= 1:
        return function(*rows)
    return torch.cat([function(*(part[at : at + 1] for part in rows)) for at in range(len(rows[0]))])


@dataclass(frozen=True, slots=True)
class GatedStreams:
    """Around one part of a layer, or behind the last one. Streams are [T, count * hidden]."""

    norm: Tensor
    """float32 [count * hidden]."""
    down: Linear
    up: Linear
    factors: Linear | None
    """Of what the part gives; None: there is no part, and streams become one."""
    count: int
    eps: float
    alone: Callable[[], bool]
    """Whether every token is computed by itself."""

    def enter(self, streams: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """What the part reads [T, hidden], and the factors of what it gives [T, count]; `dtype`: of the activations."""
        hidden, alone = streams.shape[1] // self.count, self.alone()

        def normed(streams: Tensor) -> Tensor:
            return grouped_norm(streams, self.norm, hidden, self.eps).to(dtype)

        def read(x: Tensor) -> Tensor:
            gates = self.up(F.silu(self.down(x) / self.count)).sigmoid()
            return reduce(torch.add, (gates * x).view(len(x), self.count, hidden).unbind(1)) / self.count

        x = by_token(normed, streams, alone=alone)
        factors = self.factors
        if factors is None:
            return by_token(read, x, alone=alone), None
        given = by_token(lambda x: 2 * (factors(x).float() / self.count).sigmoid(), x, alone=alone)
        return by_token(read, x, alone=alone), given

    def leave(self, y: Tensor, factors: Tensor | None, streams: Tensor) -> None:
        """Adds what the part gave, in place."""
        assert factors is not None
        hidden = y.shape[1]
        for at in range(self.count):
            streams[:, at * hidden : (at + 1) * hidden] += (y * factors[:, at : at + 1]).to(streams.dtype)

    @property
    def weight_bytes(self) -> int:
        linears = (self.down, self.up, *(() if self.factors is None else (self.factors,)))
        return sum(linear.weight_bytes for linear in linears)
