"""Activation-aware scaling of weights kept in per-channel int8.

The rounding error of a weight reaches the outputs multiplied by its input. So weights are rounded more finely at those
inputs that are large, which a calibration prompt shows.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from penstock.engine.backends.cpu.quant_linear import QuantLinear
from penstock.engine.backends.one_thread import one_thread

_STRENGTH: Final = 0.25
"""Of the ratio between inputs, in logarithms: a larger one leaves too few steps for the rest of a channel."""
_MOST: Final = 16.0


class ActivationObserver:
    """See `InputObserver`."""

    def __init__(self, linear: QuantLinear) -> None:
        self.linear = linear
        self.squares = torch.zeros(linear.in_features)
        linear.observer = self.see

    def see(self, x: Tensor) -> None:
        with one_thread():
            self.squares += x.float().square().sum(0)

    def finish(self) -> None:
        self.linear.observer = None
        least = float(self.squares.max()) * 1e-12
        if not 0 < least < torch.inf:
            return  # an expert that no token chose
        sizes = self.squares.clamp_min(least).log() * (_STRENGTH / 2)
        self.linear.scale_per_channel((sizes - sizes.mean()).exp().clamp(1 / _MOST, _MOST))
