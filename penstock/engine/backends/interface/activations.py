"""What stands between the linears of a layer: norms, and the gates of feed-forwards."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.backends.activation import Pointwise


class ActivationOps(Protocol):
    """What stands between the linears of a layer. The results go into linears only, so a backend may hand over
    activations in another form (FP8 with scales) that its linears understand; hence `Any`."""

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Any:
        """Normalize the last axis of `x` [T, hidden], whose rows may lie apart, in float32 and scale by `weight`; a new
        tensor, of `dtype` (None: that of `x`) where it is a plain one. Without `weight`, `x` as it is (layers without a
        norm before them)."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, x_weight: Tensor | None = None
    ) -> Any:
        """`residual += x` in place, then `rms_norm(residual, weight)` in the dtype of `x`; a new tensor (may reuse
        `x`).

        With `x_weight`, what is added is `rms_norm(x, x_weight)`.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Any:
        """[T, 2 * ffn] to [T, ffn]: silu of the first half times the second half."""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Any:
        """As `silu_mul`, with gelu in its tanh form."""
        ...

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Any:
        """As `silu_mul`, with the gate `ClampedSwiglu`."""
        ...

    def bounded_silu(self, gate_up: Tensor, limit: float) -> Any:
        """As `silu_mul`, with the gate `BoundedSilu`."""
        ...

    def pointwise(self, x: Tensor, function: Pointwise) -> Tensor:
        """`function` of every number of `x` [T, n]; may write over its input."""
        ...
