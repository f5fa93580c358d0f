"""The gates of feed-forwards. Nothing here needs torch: family descriptors name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """The gate of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), where the gate is at most `limit` and `up` within
    +-`limit`."""

    alpha: float = 1.702
    limit: float = 7.0


Activation = Literal["silu", "gelu_tanh"] | ClampedSwiglu
"""Of the gate; gelu in its tanh form."""
