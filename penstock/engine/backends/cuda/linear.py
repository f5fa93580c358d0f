"""Linear layers on CUDA.

Up to `gemv.MAX_BATCH` tokens a linear is bound by reading its weights once, and a Triton kernel that does only that
beats cuBLAS; it can also take the norm before it, the gate behind it and the residual addition into the same launch.
Above, cuBLAS wins. FP8 weights have one scale per output; activations are rounded to FP8 per token, unless there are
few, when the weights are widened in the kernel and activations stay as they are. Scales are applied in the vendor's
product or, where it is faster without them, behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.cuda.kernels import activation, gemv, rescale
from penstock.engine.backends.cuda.kernels.inline_lora import InlineLora
from penstock.engine.backends.interface import FP8, FP8_MAX, Activation, Link


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
        if scale is not None:
            _one(weight.device)

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
        if rescale.pays(x.data.shape[0], self.weight):
            return rescale.rescale(without_scales(x, self.weight), x.scale, self.scale, self.bias, pdl=self.pdl)
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

    def link(
        self, *, norm: Tensor | None = None, eps: float = 0.0, residual: bool = False, gated: bool = False
    ) -> Link:
        """The same product, as a part of the launch of several."""
        return Link(self.weight, self.scale, self.bias, norm, eps, gated, residual)


class Fp8Linear(CudaLinear):
    """One with FP8 weights."""

    scale: Tensor

    def gated(self, x: Tensor | ScaledTensor, gate: Activation) -> Tensor | ScaledTensor:
        """act(gate) * up of its outputs, for the linear behind it; in FP8 where the input is."""
        if isinstance(x, Tensor):
            multiply = activation.silu_mul if gate == "silu" else activation.gelu_mul
            return multiply(self(x), pdl=self.pdl)
        if self.bias is not None or not rescale.gate_pays(x.data.shape[0], self.weight):
            multiply_fp8 = activation.silu_mul_fp8 if gate == "silu" else activation.gelu_mul_fp8
            return ScaledTensor(*multiply_fp8(self(x), pdl=self.pdl))
        y = without_scales(x, self.weight)
        return ScaledTensor(*activation.gate_mul_fp8(y, x.scale, self.scale, gate, pdl=self.pdl))


@cache
def _one(device: torch.device) -> Tensor:
    """Made with the first linear: while a CUDA graph is captured it would be too late."""
    return torch.ones((), device=device)


def without_scales(x: ScaledTensor, weight: Tensor) -> Tensor:
    """The product of the FP8 numbers themselves."""
    one = _one(weight.device)
    return torch._scaled_mm(x.data, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
