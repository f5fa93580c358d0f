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
class Xielu:
    """Of Apertus, with two learned numbers a layer: x (beta + positive x) for x > 0, else beta x + negative (exp(x) - 1
    - x), in which the exponent is at most `eps`."""

    positive: float = 0.8
    negative: float = 1.3
    beta: float = 0.5
    eps: float = -1e-6


@dataclass(frozen=True, slots=True)
class Clip:
    """Numbers beyond +-`limit` become that."""

    limit: float


@dataclass(frozen=True, slots=True)
class ClampedSilu:
    """The gate of DeepSeek V4: silu(gate) * up, where the gate is at most `limit` and `up` within +-`limit`."""

    limit: float


@dataclass(frozen=True, slots=True)
class BoundedSilu:
    """The gate of Step 3.5: silu(gate) * up, where silu(gate) is at most `limit` and `up` within +-`limit`."""

    limit: float


Ungated = Literal["relu2", "plain_gelu", "plain_gelu_tanh"] | Xielu
"""Of feed-forwards without a gate: the square of a ReLU, gelu, gelu in its tanh form."""
Pointwise = Ungated | Clip
"""What is done to every number by itself."""
Activation = Literal["silu", "gelu_tanh"] | ClampedSwiglu | ClampedSilu | BoundedSilu | Ungated
"""Of the gate (gelu in its tanh form), or of feed-forwards that have none."""


def has_gate(activation: Activation) -> bool:
    """Whether a feed-forward multiplies what its up matrix gives by the activated output of another."""
    return activation not in ("relu2", "plain_gelu", "plain_gelu_tanh") and not isinstance(activation, Xielu)
