"""FP8 on CUDA: weights rounded at load, activations rounded where they are made."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.backends.cuda.block_fp8_linear import BlockFp8Linear, BlockFp8Quantizer
from penstock.engine.backends.cuda.kernels import activation, norm
from penstock.engine.backends.cuda.kernels.addends import Summands
from penstock.engine.backends.cuda.kernels.matmul import BatchInvariantLinear
from penstock.engine.backends.cuda.linear import CudaLinear, Fp8Linear, ScaledTensor
from penstock.engine.backends.interface import Pointwise
from penstock.engine.loading.fp8 import Fp8Checkpoint
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.weights import Weights, of_ends
from penstock.engine.quantization.stored import row_peaks


class Fp8Quantizer:
    """See `Quantizer`. The head stays dense: its rounding would go straight into the logits."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    def __call__(self, weights: Weights, names: dict[str, int], inputs: int, bias: Tensor | None) -> Linear | None:
        if inputs % 16 or sum(names.values()) % 16 or of_ends(names):
            return None
        if isinstance(weights, Fp8Checkpoint):
            stored = [weights.stored(name, self.device) for name in names]
            if all(part is not None for part in stored):
                parts = [part for part in stored if part is not None]
                return Fp8Linear(torch.cat([w for w, _ in parts]), bias, torch.cat([s for _, s in parts]))
        dense = torch.cat([weights.tensor(name, self.device).to(self.dtype) for name in names])
        return Fp8Linear.fp8(dense, bias, row_peaks(weights, names, self.device))


class InvariantFp8:
    """See `Quantizer`. What `inner` makes of FP8 weights, as batch-invariant linears: activations are never rounded."""

    def __init__(self, inner: Fp8Quantizer | BlockFp8Quantizer) -> None:
        self._inner = inner

    def __call__(self, weights: Weights, names: dict[str, int], inputs: int, bias: Tensor | None) -> Linear | None:
        linear = self._inner(weights, names, inputs, bias)
        if isinstance(linear, BlockFp8Linear):
            return BatchInvariantLinear(linear.weight, linear.bias, linear.scale, linear.tile)
        if isinstance(linear, CudaLinear):
            return BatchInvariantLinear(linear.weight, linear.bias, linear.scale)
        return linear


class Fp8Activations:
    """Norms and gates that give FP8 with one scale per token, for the linears behind them; `dtype` is ignored."""

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> ScaledTensor:
        return ScaledTensor(*norm.rms_norm_fp8(x, weight, eps))

    def add_rms_norm(
        self, x: Tensor | Summands, residual: Tensor, weight: Tensor | None, eps: float, x_weight: Tensor | None = None
    ) -> ScaledTensor:
        return ScaledTensor(*norm.rms_norm_fp8(x, weight, eps, residual, x_weight))

    def silu_mul(self, gate_up: Tensor) -> ScaledTensor:
        return ScaledTensor(*activation.silu_mul_fp8(gate_up))

    def gelu_mul(self, gate_up: Tensor) -> ScaledTensor:
        return ScaledTensor(*activation.gelu_mul_fp8(gate_up))

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> ScaledTensor:
        return ScaledTensor(*activation.clamped_swiglu_fp8(gate_up, alpha, limit))

    def bounded_silu(self, gate_up: Tensor, limit: float) -> ScaledTensor:
        return ScaledTensor(*activation.bounded_silu_fp8(gate_up, limit))

    def pointwise(self, x: Tensor, function: Pointwise) -> Tensor:
        return activation.pointwise(x, function)
