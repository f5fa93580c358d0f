"""What a backend makes of weights; a model is composed of these without knowing the backend."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.backends.interface import Ops
from penstock.engine.models.layers.experts import ExpertMlp
from penstock.engine.models.layers.feed_forward import FeedForward, GatedMlp
from penstock.engine.models.layers.linear import Linear


class LayerFactory(Protocol):
    """Makes the parts of layers in the form that is fastest on a device."""

    device: torch.device
    ops: Ops

    @abstractmethod
    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A dense linear in the form that is fastest here."""
        ...

    def as_head(self, linear: Linear) -> Linear:
        """`linear` as a head: logits are compared, so they keep all their bits where the kernel can give them."""
        ...

    def experts(self, stored: Callable[[], ExpertMlp], widened: Callable[[], ExpertMlp]) -> FeedForward:
        """A layer's experts, of weights as the plan made them (`stored`) or as dense ones (`widened`)."""
        ...

    def with_shared(self, routed: FeedForward, shared: GatedMlp, gate: Linear | None) -> FeedForward:
        """`SharedAndRouted` in the form that is fastest here."""
        ...
