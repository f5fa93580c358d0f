"""FP8 on CPU: weights as the checkpoint has them, or rounded at load; nothing is widened in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.backends.cpu.float8_linear import Float8Linear
from penstock.engine.backends.cpu.native import Handle
from penstock.engine.loading.fp8 import Fp8Checkpoint
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.weights import Quantizer, Weights, of_ends
from penstock.engine.quantization.stored import row_peaks


class Float8Quantizer:
    """See `Quantizer`. Weights that are not FP8 go to `rest`, or stay dense; so does the head, whose rounding would go
    straight into the logits."""

    def __init__(self, handle: Handle, rest: Quantizer | None, *, rounding: bool, many: bool) -> None:
        """`rounding`: round weights that the checkpoint has in more bits. `many`: see `Float8Linear.take_many`."""
        self._handle = handle
        self._rest = rest
        self._rounding = rounding
        self._many = many

    def __call__(self, weights: Weights, names: dict[str, int], inputs: int, bias: Tensor | None) -> Linear | None:
        linear = self._linear(weights, names, inputs, bias)
        if linear is not None:
            return linear.take_many() if self._many else linear
        return None if self._rest is None else self._rest(weights, names, inputs, bias)

    def _linear(self, weights: Weights, names: dict[str, int], inputs: int, bias: Tensor | None) -> Float8Linear | None:
        if not Float8Linear.supports((sum(names.values()), inputs)):
            return None
        if isinstance(weights, Fp8Checkpoint):
            parts = [weights.grouped(name) for name in names]
            found = [part for part in parts if part is not None]
            groups = {scale.shape[1] for _, scale in found}
            if len(found) == len(parts) and len(groups) == 1 and inputs % (4 * groups.pop()) == 0:
                weight, scale = (torch.cat(tensors) for tensors in zip(*found, strict=True))
                return Float8Linear(self._handle, weight, scale, bias)
        if not self._rounding or of_ends(names):
            return None
        dense = torch.cat([weights.tensor(name).float() for name in names])
        return Float8Linear.from_float(self._handle, dense, bias, row_peaks(weights, names, "cpu"))
