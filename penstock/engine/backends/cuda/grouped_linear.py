"""Linear layers on CUDA whose weights are integers.

`GroupedLinear`: 4 or 8 bits in groups, activations as they are. `Int8Linear`: 8 bits with one scale per output and
activations rounded to int8 per token, for the int8 tensor cores; few tokens are
bound by reading the weights, and their activations stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.cuda.kernels import gemv, grouped, int8
from penstock.engine.backends.cuda.kernels.grouped import GroupedWeight
from penstock.engine.backends.cuda.linear import CudaLinear

_WIDENED = 1 << 26
"""Weights widened at once for a large step: 128 MiB of bfloat16."""


class GroupedLinear:
    """See `Linear` and `FusedLinear`."""

    pdl = False
    """See `CudaLinear`."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None, *, fixed: bool = False) -> None:
        """`fixed`: one kernel with one order of summation, for any number of tokens."""
        self.fixed = fixed
        self.weight = weight
        self.bias = bias
        self.weight_bytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if self.fixed or x.shape[0] <= grouped.MAX_TOKENS:
            return grouped.linear(x, self.weight, bias=self.bias, fixed=self.fixed, pdl=self.pdl)
        rows, inputs = self.weight.shape
        step = max(1, _WIDENED // inputs)
        parts = []
        for first in range(0, rows, step):
            count = min(step, rows - first)
            dense = torch.empty((count, inputs), dtype=x.dtype, device=x.device)
            bias = None if self.bias is None else self.bias[first : first + count]
            parts.append(F.linear(x, grouped.widen(self.weight, first, dense, pdl=self.pdl), bias))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def fused(
        self,
        x: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor:
        """See `CudaLinear.fused`."""
        return grouped.linear(
            x,
            self.weight,
            bias=self.bias,
            norm=norm,
            eps=eps,
            residual=residual,
            gated=gated,
            out=residual,
            fixed=self.fixed,
            pdl=self.pdl,
        )


class Int8Linear:
    """Weights int8 [out, in] with `scale` [out]; `in` and `out` are multiples of 8."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scale: Tensor) -> None:
        self.few = CudaLinear(weight, bias, scale)
        self.fused = self.few.fused
        self.takes_adapters = True
        self.weight_bytes = self.few.weight_bytes
        self.scale = scale

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= gemv.MAX_BATCH:
            return self.few(x)
        rounded, token_scale = int8.quantize(x, pdl=self.few.pdl)
        sums = torch._int_mm(rounded, self.few.weight.t())
        return int8.rescale(sums, token_scale, self.scale, self.few.bias, x.dtype, pdl=self.few.pdl)
