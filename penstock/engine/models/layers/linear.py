"""Linear layers: y = x W^T + b. Backends make them; here is what a decoder asks of one.

A layer is a plain callable: no module machinery on the hot path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import Link


class Linear(Protocol):
    """A weight matrix ready to be applied to packed tokens [T, in] -> [T, out]."""

    weight_bytes: int
    """Bytes read from memory when the layer is applied once."""

    def __call__(self, x: Any) -> Tensor:
        """`x` is a tensor, or what the norms of the same decoder give (FP8 activations carry their scales)."""
        ...


class FusedLinear(Protocol):
    """A linear that takes its neighbours into the same launch, for steps of few tokens."""

    def fused(
        self,
        x: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor:
        """Normalize `x`, multiply, apply silu(gate) * up, add into `residual` in place: what is asked for."""
        ...


@runtime_checkable
class InlineLinear(Linear, Protocol):
    """A `FusedLinear` whose launch also takes the adapters of its tokens."""

    takes_adapters: bool

    def fused(
        self,
        x: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        gated: bool = False,
        lora: Any = None,
    ) -> Tensor:
        """`lora`: see `FusedLora.inline`."""
        ...


@runtime_checkable
class ChainedLinear(InlineLinear, Protocol):
    """One whose product can be a link of a chain; see `Ops.chain`."""

    def link(
        self, *, norm: Tensor | None = None, eps: float = 0.0, residual: bool = False, gated: bool = False
    ) -> Link:
        """The same product as that of `fused`."""
        ...


class SoftCapped:
    """A head whose logits are kept within +-cap by cap * tanh(logits / cap). Float32: a cap near 30 leaves bfloat16
    steps of an eighth between the best tokens."""

    def __init__(self, linear: Linear, cap: float) -> None:
        self.linear = linear
        self.cap = cap
        self.weight_bytes = linear.weight_bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x).float().div_(self.cap).tanh_().mul_(self.cap)


class Scaled:
    """A head whose logits are multiplied by a factor, in float32."""

    def __init__(self, linear: Linear, factor: float) -> None:
        self.linear = linear
        self.factor = factor
        self.weight_bytes = linear.weight_bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x).float().mul_(self.factor)


class WideLinear:
    """Products in float32, whatever activations are: of small matrices whose results are compared with each other."""

    def __init__(self, weight: Tensor, alone: Callable[[], bool]) -> None:
        """`weight`: float32 [out, in]. `alone`: whether each row is multiplied by itself, so that its results do not
        depend on how many others there are."""
        self.weight = weight
        self.weight_bytes = weight.numel() * weight.element_size()
        self._alone = alone

    def __call__(self, x: Tensor) -> Tensor:
        if not self._alone():
            return F.linear(x.float(), self.weight)
        return torch.cat([F.linear(row.float(), self.weight) for row in torch.split(x, 1)])


def shaped(head: Linear, scale: float, softcap: float | None) -> Linear:
    """`head` with what its family does to the logits."""
    if scale != 1.0:
        head = Scaled(head, scale)
    return head if softcap is None else SoftCapped(head, softcap)
