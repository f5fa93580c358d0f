"""Batch-invariant linears, for deterministic mode: a result never depends on what else is in the step.

Few-bit blocks on CPU use the same kernel for any number of rows; everything else is dense, through kernels with a
single order of summation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.weights import Quantizer, Weights
from penstock.errors import CheckpointError


class BatchInvariantLinears:
    """See `Quantizer`. `few_bits` is asked first; what it leaves becomes `dense(weight, bias)`."""

    def __init__(
        self,
        dense: Callable[[Tensor, Tensor | None], Linear],
        few_bits: Quantizer | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.dense = dense
        self.few_bits = few_bits
        self.device = device
        self.dtype = dtype

    @property
    def widened(self) -> BatchInvariantLinears:
        """The same, making dense linears only."""
        return BatchInvariantLinears(self.dense, None, self.device, self.dtype)

    def __call__(self, weights: Weights, names: dict[str, int], inputs: int, bias: Tensor | None) -> Linear | None:
        if self.few_bits is not None:
            linear = self.few_bits(weights, names, inputs, bias)
            if linear is not None:
                return linear
        parts = [weights.tensor(name, self.device).to(self.device, self.dtype) for name in names]
        for (name, size), part in zip(names.items(), parts, strict=True):
            if tuple(part.shape) != (size, inputs):
                raise CheckpointError(
                    f"tensor {name!r} has shape {tuple(part.shape)}, the configuration says {(size, inputs)}"
                )
        return self.dense(torch.cat(parts), bias)
