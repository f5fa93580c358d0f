"""Per-group integer weights of any published layout, converted for the CPU kernels.

The kernels have blocks of 32: int8 with a float16 scale, or 4 bits with a float16 scale and minimum. A larger group
becomes several blocks with the same scale. Values that do not fit exactly are rounded: a minimum or a scale to float16
(by less than 1/2000 of itself), and 8-bit weights with a minimum to symmetric int8.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.engine.backends.cpu.native import Handle
from penstock.engine.backends.cpu.quant_linear import BLOCK, QuantLinear
from penstock.engine.loading.groups import IntGroups, stack
from penstock.engine.models.layers.composed import PermutedLinear, StackedLinear
from penstock.engine.models.layers.linear import Linear

Finish = Callable[[QuantLinear], QuantLinear]
"""Chooses the forms of a linear."""


def linear_of_groups(handle: Handle, parts: list[IntGroups], bias: Tensor | None, finish: Finish) -> Linear | None:
    """One linear of matrices with the same inputs; None if a group is not a multiple of a block."""
    if any(part.group % BLOCK for part in parts):
        return None
    whole = stack(parts)
    if whole is not None:
        return _linear(handle, whole, bias, finish)
    biases = [None] * len(parts) if bias is None else torch.split(bias, [part.shape[0] for part in parts])
    return StackedLinear([_linear(handle, part, b, finish) for part, b in zip(parts, biases, strict=True)])


def _linear(handle: Handle, groups: IntGroups, bias: Tensor | None, finish: Finish) -> Linear:
    if groups.bits == 8 and groups.minimum is not None:
        return finish(QuantLinear.from_float(handle, groups.dense(), bias, bits=8))
    kind, raw = blocks_of(groups)
    linear = finish(QuantLinear.from_gguf(handle, kind, raw, groups.shape, bias))  # type: ignore[arg-type]
    return linear if groups.order is None else PermutedLinear(linear, groups.order)


def blocks_of(groups: IntGroups) -> tuple[str, Tensor]:
    """The groups as blocks of 32 in the layout of a GGUF file: its type, and the bytes."""
    cut = groups.in_groups_of(BLOCK)
    scale = cut.scale.half().unsqueeze(-1).view(torch.uint8)
    quants = cut.quants.reshape(cut.shape[0], -1, BLOCK)
    if cut.bits == 8:
        return "Q8_0", torch.cat((scale, quants.view(torch.uint8)), dim=-1).flatten()
    low = torch.zeros_like(cut.scale) if cut.minimum is None else cut.minimum
    pairs = quants[..., : BLOCK // 2] | quants[..., BLOCK // 2 :] << 4
    return "Q4_1", torch.cat((scale, low.half().unsqueeze(-1).view(torch.uint8), pairs), dim=-1).flatten()
