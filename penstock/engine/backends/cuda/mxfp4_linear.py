"""Experts in MXFP4 on CUDA: taken over from a checkpoint as stored."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.cuda.kernels.matmul import matmul
from penstock.engine.loading.mxfp4 import Mxfp4, stored_mxfp4
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.weights import Quantizer, Weights


class Mxfp4Linear:
    """One matrix of one expert. `experts.group` stacks them for the kernels; by itself it is widened at every call."""

    def __init__(self, weight: Mxfp4, bias: Tensor | None, *, fixed: bool = False) -> None:
        """`fixed`: batch-invariant."""
        self._product = matmul if fixed else F.linear
        self.weight = weight
        self.bias = bias
        self.weight_bytes = weight.blocks.numel() + weight.scales.numel()

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, self.weight.dense().to(x.dtype), self.bias)


class Mxfp4Quantizer:
    """See `Quantizer`. Matrices that are not in MXFP4 go to `rest`."""

    def __init__(self, device: torch.device, rest: Quantizer | None, *, fixed: bool = False) -> None:
        """`fixed`: linears are batch-invariant."""
        self._fixed = fixed
        self._device = device
        self._rest = rest

    def __call__(self, weights: Weights, names: dict[str, int], inputs: int, bias: Tensor | None) -> Linear | None:
        stored = stored_mxfp4(weights, names, inputs, self._device)
        if stored is not None:
            return Mxfp4Linear(stored, bias, fixed=self._fixed)
        return None if self._rest is None else self._rest(weights, names, inputs, bias)
