"""The activations of feed-forwards. Nothing here needs torch: family descriptors name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """The gate of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), where the gate is at most `limit` and `up` within
    +-`limit`."""

    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True, slots=True)
class ClampedSilu:
    """The gate of DeepSeek V4: silu(gate) * up, where the gate is at most `limit` and `up` within +-`limit`."""

    limit: float


Activation = Literal["silu", "gelu_tanh", "relu2"] | ClampedSwiglu | ClampedSilu
"""Of the gate; gelu in its tanh form. With `relu2`, the square of a ReLU, there is no gate."""


def has_gate(activation: Activation) -> bool:
    """Whether a feed-forward multiplies what its up matrix gives by the activated output of another."""
    return activation != "relu2"
