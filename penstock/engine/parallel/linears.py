"""Linears and feed-forwards whose other parts are on other ranks.

A layer's query-key-value and gate-up matrices are cut by outputs, its output and down matrices by inputs; between the
two nothing is exchanged, and behind the second the partial results are summed. The head is cut by outputs and its
logits are put together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.interface import ActivationOps
from penstock.engine.models.layers.feed_forward import FeedForward
from penstock.engine.models.layers.linear import Linear
from penstock.engine.parallel.groups import Group


class SummedLinear:
    """A matrix cut by inputs: every rank has a part of the sum."""

    def __init__(self, linear: Linear, group: Group) -> None:
        self.linear = linear
        self.group = group
        self.weight_bytes = linear.weight_bytes

    def __call__(self, x: Any) -> Tensor:
        return self.group.sum(self.linear(x))


class SummedFeedForward:
    """A feed-forward cut by width, dense or of experts: every rank has a part of the sum."""

    def __init__(self, feed_forward: FeedForward, group: Group) -> None:
        self.feed_forward = feed_forward
        self.group = group

    @property
    def ops(self) -> ActivationOps:
        return self.feed_forward.ops

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.feed_forward.linears

    @property
    def weight_bytes(self) -> int:
        return self.feed_forward.weight_bytes

    def forward(self, x: Any) -> Tensor:
        return self.group.sum(self.feed_forward.forward(x))


class GatheredLinear:
    """A matrix cut by outputs, whose whole result every rank needs; `outputs` leaves out the padding at its end."""

    def __init__(self, linear: Linear, group: Group, outputs: int) -> None:
        self.linear = linear
        self.group = group
        self.outputs = outputs
        self.weight_bytes = linear.weight_bytes

    def __call__(self, x: Any) -> Tensor:
        parts = self.group.gather(self.linear(x))
        size = parts[0].shape[-1]
        return torch.cat([part[..., : max(0, self.outputs - i * size)] for i, part in enumerate(parts)], dim=-1)
