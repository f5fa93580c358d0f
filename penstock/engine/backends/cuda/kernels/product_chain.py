"""The products between two attentions of one token in one launch; see `interface.links`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.backends.interface import Link, apply_links


def applies(links: Sequence[Link], device: torch.device) -> bool:
    """Whether `ProductChain` computes these links on `device`."""
    return False


class ProductChain:
    """The links between two attentions, prepared once. Two chains of a device must not run at the same time."""

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = tuple(links)

    def __call__(self, x: Tensor, residual: Tensor, pdl: bool) -> Tensor | None:
        """`x` [1, K of the first link]; `residual` [1, hidden] is changed in place. Returns the last link's output
        [1, N], unless that adds to the residual stream."""
        return apply_links(self.links, x, residual)
