"""Linears and feed-forwards whose other parts are on other ranks.

A layer's query-key-value and gate-up matrices are cut by outputs, its output and down matrices by inputs; between the
two nothing is exchanged, and behind the second the partial results are summed. The head is cut by outputs and its
logits are put together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.engine.backends.interface import ActivationOps
from penstock.engine.models.layers.feed_forward import FeedForward
from penstock.engine.models.layers.forwarder import Forwarder
from penstock.engine.models.layers.linear import Linear
from penstock.engine.parallel.groups import Group


@dataclass(frozen=True, slots=True)
class Unsummed:
    """This rank's part of a sum that the norm behind it makes, in one launch with the residual addition."""

    part: Any


def summed(part: Any, group: Group, at_once: bool = False) -> Any:
    """The sum, or `Unsummed` where that is faster: the operations behind it must then be `SummingOps`. `at_once`: the
    sum in any case."""
    return group.sum(part) if at_once or group.peers is None else Unsummed(part)


class SummingOps(Forwarder):
    """The operations between layers, where what is added to the residual stream may be `Unsummed`."""

    def __init__(self, ops: Any, group: Group) -> None:
        super().__init__(ops)
        self._group = group

    def add_rms_norm(
        self, x: Any, residual: Tensor, weight: Tensor | None, eps: float, x_weight: Tensor | None = None
    ) -> Any:
        if isinstance(x, Unsummed):
            return self._group.add_rms_norm(self._base, x.part, residual, weight, eps, x_weight)
        return self._base.add_rms_norm(x, residual, weight, eps, x_weight)

    def with_inner(self, change: Callable[[Any], Any]) -> SummingOps:
        """The same over other operations."""
        return SummingOps(change(self._base), self._group)

    def __eq__(self, other: object) -> bool:
        """Made anew for every layer, so identity says nothing."""
        return isinstance(other, SummingOps) and self._base == other._base and self._group is other._group

    __hash__ = object.__hash__

    def centre(self, residual: Tensor, *added: Any) -> None:
        parts = [x.part for x in added if isinstance(x, Unsummed)]
        if parts:
            whole = [x for x in added if not isinstance(x, Unsummed)]
            added = *whole, self._group.sum(parts[0].add_(parts[1]) if len(parts) > 1 else parts[0])
        self._base.centre(residual, *added)


def summing(ops: Any, group: Group) -> Any:
    """`ops` for layers whose sums go through `group`."""
    return ops if group.peers is None else SummingOps(ops, group)


class SummedLinear:
    """A matrix cut by inputs: every rank has a part of the sum."""

    def __init__(self, linear: Linear, group: Group, at_once: bool = False) -> None:
        self.linear = linear
        self.group = group
        self.at_once = at_once
        self.weight_bytes = linear.weight_bytes

    def __call__(self, x: Any) -> Any:
        return summed(self.linear(x), self.group, self.at_once)


class SummedFeedForward:
    """A feed-forward cut by width, dense or of experts: every rank has a part of the sum."""

    def __init__(self, feed_forward: FeedForward, group: Group, at_once: bool = False) -> None:
        self.feed_forward = feed_forward
        self.group = group
        self.at_once = at_once

    @property
    def ops(self) -> ActivationOps:
        ops: ActivationOps = summing(self.feed_forward.ops, self.group)
        return ops

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.feed_forward.linears

    @property
    def weight_bytes(self) -> int:
        return self.feed_forward.weight_bytes

    def forward(self, x: Any) -> Any:
        return summed(self.feed_forward.forward(x), self.group, self.at_once)


class GatheredLinear:
    """A matrix cut by outputs, whose whole result every rank needs; `outputs` leaves out the padding at its end."""

    def __init__(self, linear: Linear, group: Group, outputs: int) -> None:
        self.linear = linear
        self.group = group
        self.outputs = outputs
        self.weight_bytes = linear.weight_bytes

    def __call__(self, x: Any) -> Tensor:
        return self.group.join(self.linear(x), self.outputs)
