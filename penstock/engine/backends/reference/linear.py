"""Dense linears through PyTorch.

On CPU, large weights are prepacked once into oneDNN's blocked layout (2 to 4 times faster than packing at every call).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


class DenseLinear:
    """Row-major weights, the vendor library's matmul."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.weight_bytes = weight.numel() * weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


SMALL = 1 << 16
"""Up to so many float32 weights fit a core's cache."""


def is_small(weight: Tensor) -> bool:
    """Whether packing these weights at every call takes less time than oneDNN takes to find its kernel, and far less
    than it takes to generate one, which it does for every other number of rows."""
    return weight.dtype == torch.float32 and weight.numel() <= SMALL


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN has a blocked layout for weights of this type on this processor."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype != torch.float16 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


class PackedLinear:
    """oneDNN weights in their blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self.bias = bias
        self.weight_bytes = weight.numel() * weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out
