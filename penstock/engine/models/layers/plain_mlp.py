"""A feed-forward without a gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.engine.backends.interface import ActivationOps
from penstock.engine.models.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class PlainMlp:
    """down(relu(up(x)) ** 2); see `FeedForward`."""

    ops: ActivationOps
    up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.up, self.down

    @property
    def weight_bytes(self) -> int:
        return self.up.weight_bytes + self.down.weight_bytes

    def forward(self, x: Any) -> Tensor:
        return self.down(self.up(x).relu_().square_())
