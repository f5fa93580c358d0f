"""Linears for the CPU kernels: blocks of 32, as a GGUF file stores them or rounded from floats, or bfloat16 tiles."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.engine.backends.cpu.group_blocks import linear_of_groups
from penstock.engine.backends.cpu.linear_forms import FORMS
from penstock.engine.backends.cpu.native import Handle
from penstock.engine.backends.cpu.quant_linear import QuantLinear
from penstock.engine.backends.cpu.tuner import Tuner
from penstock.engine.config import ActivationForm, WeightForm
from penstock.engine.loading.checkpoint import GGUFCheckpoint
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.weights import Weights
from penstock.engine.quantization.stored import stored_groups

_BITS = {"int8": 8, "int4": 4}
_PER_CHANNEL_BUDGET = 1 << 30
"""Bytes for per-channel copies of few-bit weights: all of a small model's."""
_STORED = ("Q4_0", "Q4_1", "Q8_0")


class BlockQuantizer:
    """See `Quantizer`. `form` and `activations` are what the configuration asked for."""

    def __init__(
        self,
        handle: Handle,
        form: WeightForm,
        activations: ActivationForm = "auto",
        matrix: bool = False,
        fixed: bool = False,
        steady_rows: int = 0,
        per_channel: bool = False,
    ) -> None:
        """`per_channel`: keep per-channel copies, for several rows; `fixed`: one form for any number of rows, which
        also holds where `activations` names one; `steady_rows`: one form for fewer rows than that."""
        self.handle = handle
        self.matrix = matrix
        """Keep what stays dense in bfloat16 matrix tiles instead of leaving it to the vendor's library."""
        self._per_channel_budget = _PER_CHANNEL_BUDGET
        self._keeps_per_channel = per_channel
        self.form = form
        self.activation_parts = 1 if activations == "int8" else 2
        self.fixed = fixed or activations != "auto"
        self.steady_rows = steady_rows
        self._tuner = Tuner(handle) if not self.fixed else None
        """`auto` is int16 activations for few rows and the fastest of equal quality for many: int8 is faster still, but
        changes what small models say (`penstock bench perplexity` shows by how much)."""

    def __call__(self, weights: Weights, names: dict[str, int], inputs: int, bias: Tensor | None) -> Linear | None:
        shape = (sum(names.values()), inputs)
        if not QuantLinear.supports(shape):
            return None
        if self.form != "dense":
            linear = self._as_stored(weights, names, shape, bias)
            if linear is not None:
                return self._finish(linear)
            parts = stored_groups(weights, names, inputs, self.form, "cpu")
            grouped = None if parts is None else linear_of_groups(self.handle, parts, bias, self._finish)
            if grouped is not None:
                return grouped
        bits = _BITS.get(self.form, 16 if self.matrix else None)
        if bits is None:
            return None
        dense = torch.cat([weights.tensor(name).float() for name in names])
        return self._finish(QuantLinear.from_float(self.handle, dense, bias, bits=bits))

    def _finish(self, linear: QuantLinear) -> QuantLinear:
        """Choose the forms of a linear."""
        linear.activation_parts = self.activation_parts
        first_rows = linear.first_rows
        if self.fixed:
            first_rows.clear()
            first_rows["bfloat16"] = 1 if linear.bits == 16 else 0
            return linear
        size = linear.in_features * linear.out_features
        if self._keeps_per_channel and linear.bits < 16 and size <= self._per_channel_budget:
            self._per_channel_budget -= size
            linear.keep_per_channel()
        if self._tuner is not None:
            self._tuner.tune(linear)
        if linear.bits < 16:
            for form in FORMS:
                if first_rows[form.name] > 1:
                    first_rows[form.name] = max(first_rows[form.name], self.steady_rows)
        return linear

    def _as_stored(
        self, weights: Weights, names: dict[str, int], shape: tuple[int, int], bias: Tensor | None
    ) -> QuantLinear | None:
        """The file's own blocks, when all matrices have one type that the kernels read and the form asks for."""
        if not isinstance(weights, GGUFCheckpoint):
            return None
        raws = [weights.raw(name) for name in names]
        kinds = {raw.type.name for raw in raws}
        if len(kinds) != 1 or any(
            raw.shape != (size, shape[1]) for raw, size in zip(raws, names.values(), strict=True)
        ):
            return None
        (kind,) = kinds
        if kind not in _STORED or (self.form == "int8" and kind != "Q8_0") or (self.form == "int4" and kind == "Q8_0"):
            return None
        blocks = torch.from_numpy(np.concatenate([raw.data.reshape(-1) for raw in raws]))
        return QuantLinear.from_gguf(self.handle, kind, blocks, shape, bias)  # type: ignore[arg-type]
