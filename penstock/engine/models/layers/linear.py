"""Linear layers: y = x W^T + b, in the form that is fastest where they run.

On CPU, weights are prepacked once into oneDNN's blocked layout (2 to 4 times faster than packing at every call); on
CUDA they stay dense. A layer is a plain callable: no module machinery on the hot path.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F


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


class DenseLinear:
    """Row-major weights, the vendor library's matmul."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.weight_bytes = weight.numel() * weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """oneDNN weights in their blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self.bias = bias
        self.weight_bytes = weight.numel() * weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


class SoftCapped:
    """A head whose logits are kept within +-cap by cap * tanh(logits / cap). Float32: a cap near 30 leaves bfloat16
    steps of an eighth between the best tokens."""

    def __init__(self, linear: Linear, cap: float) -> None:
        self.linear = linear
        self.cap = cap
        self.weight_bytes = linear.weight_bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x).float().div_(self.cap).tanh_().mul_(self.cap)


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Choose the form for the device and dtype of `weight`."""
    if weight.device.type == "cpu" and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return PackedLinear(weight, bias)
    if weight.is_cuda and importlib.util.find_spec("triton") is not None:
        from penstock.engine.backends.cuda.linear import CudaLinear

        return CudaLinear(weight, bias)
    return DenseLinear(weight, bias)
