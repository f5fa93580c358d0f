"""A norm behind every expert: of what it gives for each token that visits it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.backends.interface import Ops


@dataclass(frozen=True, slots=True)
class VisitNorm:
    """Normalizes what every expert gives for a token, before these are weighted and added up."""

    ops: Ops
    scale: Tensor
    """float32 [width]: what an expert gives is multiplied by it first."""
    gains: Tensor
    """[width]: ones."""
    eps: float
    over_ranks: Callable[[Tensor], Tensor] | None = None
    """Where ranks have parts of every expert: what sums up what they give."""
    share: tuple[int, int] = (0, 1)
    """Then: which rank this one is, of how many. Each goes on with visits of its own, so that the ranks' results are
    still parts of a sum."""

    def __call__(self, outputs: Tensor, top_k: int) -> Tensor:
        """`outputs` [T * top_k, width]; zeros stay zeros."""
        if not len(outputs):
            return outputs
        if self.over_ranks is not None:
            outputs = self.over_ranks(outputs)
        normed: Tensor = self.ops.rms_norm((outputs * self.scale).to(outputs.dtype), self.gains, self.eps)
        if self.over_ranks is None:
            return normed
        rank, ranks = self.share
        mine = torch.arange(top_k, device=normed.device) % ranks == rank
        return normed.view(-1, top_k, normed.shape[1]).mul_(mine.unsqueeze(-1)).view(normed.shape)
