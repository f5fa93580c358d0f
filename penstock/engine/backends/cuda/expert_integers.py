"""The integer weights of a layer's experts as one stack, for `experts`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.backends.cuda.grouped_linear import GroupedLinear
from penstock.engine.backends.cuda.kernels import moe_groups
from penstock.engine.backends.cuda.kernels.grouped import GroupedWeight
from penstock.engine.backends.cuda.kernels.moe_groups import GroupsStack
from penstock.engine.backends.cuda.kernels.moe_plan import FewPairs, Plan
from penstock.engine.backends.interface import Activation
from penstock.engine.models.layers.composed import PermutedLinear, StackedLinear
from penstock.engine.models.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class IntegerStack:
    """One matrix of every expert in 4 or 8 bits, and biases [experts, out] where they have them."""

    stack: GroupsStack
    bias: Tensor | None

    @property
    def form(self) -> tuple[object, ...]:
        """See `Stack.form`."""
        stack = self.stack
        return stack.bits, stack.group, stack.has_minimum, stack.columns is not None

    @property
    def experts(self) -> int:
        return self.stack.shape[0]

    @property
    def weight_bytes(self) -> int:
        return self.stack.nbytes

    @property
    def outputs(self) -> int:
        return self.stack.shape[1]

    @property
    def device(self) -> torch.device:
        return self.stack.data.device

    def product(
        self,
        x: Tensor,
        schedule: Plan | FewPairs,
        top_k: int,
        gate: Activation | None,
        route_weights: Tensor | None,
        counters: Tensor,
        fixed: bool = False,
    ) -> Tensor:
        """See `Stack.product`."""
        assert not fixed, "experts in integers are widened in deterministic mode"
        return moe_groups.grouped_linear(
            x,
            self.stack,
            self.bias,
            schedule,
            top_k,
            gated=gate is not None,
            route_weights=route_weights,
            activation=gate or "silu",
            counters=counters,
        )

    def put(self, index: int, linear: Linear) -> None:
        """Another expert's matrix, of the same form."""
        plain, order = _plain(linear)
        assert plain is not None
        self.stack.put(index, plain.weight, order)
        if self.bias is not None and plain.bias is not None:
            self.bias[index].copy_(plain.bias)


def integer_stack(linears: list[Linear]) -> IntegerStack | None:
    """None where one of them is in another form, or gate and up have their columns in different orders. None in
    deterministic mode, too: sums of groups were seen to depend on the other tokens, so experts are widened there."""
    found = [_plain(linear) for linear in linears]
    parts = [plain for plain, _ in found if plain is not None]
    if any(part.fixed for part in parts):
        return None
    biases = [part.bias for part in parts if part.bias is not None]
    if len(parts) != len(linears) or len(biases) not in (0, len(parts)):
        return None
    stack = moe_groups.stacked([part.weight for part in parts], [order for _, order in found])
    return None if stack is None else IntegerStack(stack, torch.stack(biases) if biases else None)


def _plain(linear: Linear) -> tuple[GroupedLinear | None, Tensor | None]:
    """The linear without its permutation, and the input of each of its columns."""
    if isinstance(linear, PermutedLinear):
        inner, _ = _plain(linear.inner)
        return inner, linear.order
    if isinstance(linear, StackedLinear):
        return _joined([_plain(part) for part in linear.parts])
    return (linear, None) if isinstance(linear, GroupedLinear) else (None, None)


def _joined(parts: list[tuple[GroupedLinear | None, Tensor | None]]) -> tuple[GroupedLinear | None, Tensor | None]:
    """One linear of several whose groups or bits differ."""
    linears = [linear for linear, _ in parts if linear is not None]
    order = parts[0][1]
    orders = [found for _, found in parts if found is not None]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    same = len(orders) in (0, len(parts)) and all(order is not None and torch.equal(order, found) for found in orders)
    if len(linears) != len(parts) or not same or len(biases) not in (0, len(parts)):
        return None, None
    weights = [linear.weight for linear in linears]
    if len({weight.bits for weight in weights}) > 1:
        weights = [weight.in_8_bits() for weight in weights]
    size = min(weight.group for weight in weights)
    whole = GroupedWeight(
        torch.cat([weight.data for weight in weights]),
        torch.cat([weight.factors_by(size) for weight in weights], dim=1),
        weights[0].bits,
        size,
        any(weight.has_minimum for weight in weights),
    )
    return GroupedLinear(whole, torch.cat(biases) if biases else None, fixed=linears[0].fixed), order
