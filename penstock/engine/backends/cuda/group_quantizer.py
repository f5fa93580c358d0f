"""Integer weights on CUDA: taken over from a checkpoint as stored, or rounded at load."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.backends.cuda.grouped_linear import GroupedLinear, Int8Linear
from penstock.engine.backends.cuda.kernels.grouped import BLOCK, GroupedWeight, join_factors
from penstock.engine.config import ActivationForm, WeightForm
from penstock.engine.loading.groups import IntGroups, stack
from penstock.engine.models.layers.composed import PermutedLinear, StackedLinear
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.weights import Weights, of_ends
from penstock.engine.quantization.grids import pick_group, round_int4, round_int8
from penstock.engine.quantization.stored import stored_groups

_LARGEST = 128
"""Groups beyond this are cut: a group is one step of the kernel."""


class GroupQuantizer:
    """See `Quantizer`. `form`: `auto` takes over what is stored; `int8` and `int4` round what is not stored so.

    With `activations` of int8, 8-bit weights with one scale per row run on the int8 tensor cores. `fixed`: linears are
    batch-invariant.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        form: WeightForm,
        activations: ActivationForm = "auto",
        *,
        fixed: bool = False,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.form = form
        self.int8_activations = activations == "int8"
        self.fixed = fixed

    def __call__(self, weights: Weights, names: dict[str, int], inputs: int, bias: Tensor | None) -> Linear | None:
        parts = stored_groups(weights, names, inputs, self.form, self.device)
        if parts is None and self.form != "auto":
            parts = self._rounded(weights, names, inputs)
        if parts is None or any(part.group % BLOCK for part in parts):
            return None
        whole = stack(parts)
        if whole is not None:
            return self._linear(whole, bias)
        biases = [None] * len(parts) if bias is None else torch.split(bias, [part.shape[0] for part in parts])
        return StackedLinear([self._linear(part, b) for part, b in zip(parts, biases, strict=True)])

    def _rounded(self, weights: Weights, names: dict[str, int], inputs: int) -> list[IntGroups] | None:
        group = pick_group(inputs)
        if group is None:
            return None
        # The head's rounding goes straight into the logits: it gets 8 bits in any case.
        head = of_ends(names)
        found = []
        for name in names:
            dense = weights.tensor(name, self.device)
            if self.form == "int4" and not head:
                found.append(round_int4(dense, group))
            else:
                found.append(round_int8(dense, inputs if self.int8_activations else group))
        return found

    def _linear(self, groups: IntGroups, bias: Tensor | None) -> Linear:
        linear: Linear
        by_row = groups.bits == 8 and groups.minimum is None and groups.scale.shape[1] == 1
        if self.int8_activations and by_row and groups.shape[0] % 8 == 0 and groups.shape[1] % 8 == 0:
            linear = Int8Linear(groups.quants, bias, groups.scale.squeeze(1))
        else:
            linear = GroupedLinear(device_form(groups), bias, fixed=self.fixed)
        return linear if groups.order is None else PermutedLinear(linear, groups.order)


def device_form(groups: IntGroups) -> GroupedWeight:
    """The groups as the kernels read them."""
    size = min(groups.group & -groups.group, _LARGEST)
    cut = groups.in_groups_of(size)
    low = None if cut.minimum is None else cut.minimum.T.half()
    data = cut.quants
    if cut.bits == 4:
        pairs = data.reshape(data.shape[0], -1, 2, BLOCK // 2)
        data = (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)
    return GroupedWeight(data.contiguous(), join_factors(cut.scale.T.half(), low), cut.bits, size, low is not None)
