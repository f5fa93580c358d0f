"""Linear layers on CUDA.

Up to `gemv.MAX_BATCH` tokens a linear is bound by reading its weights once, and a Triton kernel that does only that
beats cuBLAS; it can also take the norm before it, the gate behind it and the residual addition into the same launch.
Above, cuBLAS wins, except where it leaves the device idle (`stream`). FP8 weights have one scale per output;
activations are rounded to FP8 per token, unless there are few, when the weights are widened in the kernel and
activations stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.cuda.kernels import activation, gemv, stream
from penstock.engine.backends.cuda.kernels.inline_lora import InlineLora
from penstock.engine.backends.interface import FP8, FP8_MAX


@dataclass(frozen=True, slots=True)
class ScaledTensor:
    """Activations in FP8 with one float32 scale per token [T, 1]."""

    data: Tensor
    scale: Tensor


class CudaLinear:
    """Weights [out, in] in the dtype of the activations, or in FP8 with `scale` [out]."""

    pdl = False
    """Start while the kernel before is still finishing (programmatic dependent launch, Hopper and later)."""
    takes_adapters = True

    def __init__(self, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.scale = scale
        self.weight_bytes = weight.numel() * weight.element_size()
        self._counters = None if scale is None else stream.counters_for(weight)

    @classmethod
    def fp8(cls, weight: Tensor, bias: Tensor | None, peaks: Tensor | None = None) -> CudaLinear:
        """Round a dense weight to FP8, each output row scaled by its own largest value; `peaks`: see `row_peaks`."""
        peaks = weight.abs().amax(dim=1).float() if peaks is None else peaks
        scale = peaks.clamp(min=1e-12) / FP8_MAX
        data = (weight.float() / scale.unsqueeze(1)).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
        return cls(data, bias, scale)

    def __call__(self, x: Tensor | ScaledTensor) -> Tensor:
        if isinstance(x, Tensor) and x.shape[0] <= gemv.MAX_BATCH:
            return gemv.linear(x, self.weight, bias=self.bias, weight_scale=self.scale, pdl=self.pdl)
        if self.scale is None:
            assert isinstance(x, Tensor)
            return F.linear(x, self.weight, self.bias)
        if isinstance(x, Tensor):
            x = ScaledTensor(*activation.quantize_fp8(x))
        if self._counters is not None and x.data.shape[0] <= stream.MOST_TOKENS:
            return stream.linear(x.data, x.scale, self.weight, self.scale, self._counters, self.bias, pdl=self.pdl)
        return torch._scaled_mm(
            x.data,
            self.weight.t(),
            scale_a=x.scale,
            scale_b=self.scale.unsqueeze(0),
            bias=self.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    def fused(
        self,
        x: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        gated: bool = False,
        lora: InlineLora | None = None,
    ) -> Tensor:
        """One launch for few tokens: normalize `x`, multiply, add adapters, gate, and add into `residual` in place."""
        return gemv.linear(
            x,
            self.weight,
            bias=self.bias,
            weight_scale=self.scale,
            norm=norm,
            eps=eps,
            residual=residual,
            gated=gated,
            out=residual,
            lora=lora,
            pdl=self.pdl,
        )
