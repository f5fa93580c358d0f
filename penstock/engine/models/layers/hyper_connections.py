"""Several residual streams instead of one (manifold-constrained hyper-connections).

Before a part of a layer the streams are added up into its input; behind it they are mixed with each other, and what the
part gives is added to each. The weights of these sums are computed from the streams themselves, in float32. Those of
the mixing are scaled until rows and columns sum to one (Sinkhorn-Knopp), so that streams do not grow with the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.models.model_config import StreamsConfig


class Entered(NamedTuple):
    """What a part reads, and how its output goes back."""

    x: Tensor
    """[T, hidden], as the streams are."""
    added: Tensor
    """float32 [T, streams]: factors of the output."""
    mixed: Tensor | None
    """float32 [T, streams, streams]: what of each stream (first) goes to each (second); None: they stay apart."""

    def leave(self, y: Tensor, streams: Tensor) -> Tensor:
        """The streams behind the part, which gave `y`."""
        added = self.added.unsqueeze(-1) * y.unsqueeze(1)
        if self.mixed is None:
            return (added + streams).to(streams.dtype)
        # One product after another: how a matrix product is added up may depend on how many tokens there are.
        parts = [self.mixed[:, i].unsqueeze(-1) * streams[:, i : i + 1] for i in range(streams.shape[1])]
        return reduce(torch.add, parts, added).to(streams.dtype)


@dataclass(frozen=True, slots=True)
class HyperConnection:
    """Around one part of a layer."""

    weight: Tensor
    """float32 [(2 + n) * n, n * hidden] for n streams: for what is read, what is added, what is mixed; [2 * n, n *
    hidden] where nothing is."""
    base: Tensor
    scale: Tensor
    """float32 [(2 + n) * n]: what is added to the scores, once they are multiplied by the other."""
    streams: StreamsConfig
    norm_eps: float
    alone: Callable[[], bool]
    """Whether every token is computed by itself."""

    def enter(self, streams: Tensor) -> Entered:
        if self.alone() and len(streams) > 1:
            each = [self._enter(one) for one in _singly(streams)]
            mixed = [one.mixed for one in each if one.mixed is not None]
            return Entered(
                torch.cat([one.x for one in each]),
                torch.cat([one.added for one in each]),
                torch.cat(mixed) if mixed else None,
            )
        return self._enter(streams)

    def _enter(self, streams: Tensor) -> Entered:
        n, eps = self.streams.count, self.streams.eps
        scores = F.linear(_normed(streams, self.norm_eps), self.weight) * self.scale + self.base
        read, added, mixed = scores[:, :n], scores[:, n : 2 * n], scores[:, 2 * n :]
        x = _added_up(read.sigmoid() + eps, streams)
        factors = self.streams.magnitude * added.sigmoid() + (eps if self.streams.eps_added else 0.0)
        if not self.streams.rounds:
            return Entered(x, factors, None)
        weights = mixed.reshape(-1, n, n).softmax(-1) + eps
        weights = weights / (weights.sum(-2, keepdim=True) + eps)
        for _ in range(self.streams.rounds - 1):
            weights = weights / (weights.sum(-1, keepdim=True) + eps)
            weights = weights / (weights.sum(-2, keepdim=True) + eps)
        return Entered(x, factors, weights)


@dataclass(frozen=True, slots=True)
class StreamsHead:
    """Behind the last layer: the streams become one."""

    weight: Tensor
    """float32 [n, n * hidden]; so are the others."""
    base: Tensor
    scale: Tensor
    eps: float
    norm_eps: float
    alone: Callable[[], bool]

    def __call__(self, streams: Tensor) -> Tensor:
        runs = _singly(streams) if self.alone() and len(streams) > 1 else [streams]
        return torch.cat([self._of(run) for run in runs])

    def _of(self, streams: Tensor) -> Tensor:
        scores = F.linear(_normed(streams, self.norm_eps), self.weight)
        return _added_up((scores * self.scale + self.base).sigmoid() + self.eps, streams)


def mean_of(streams: Tensor) -> Tensor:
    """The same where no weights are computed. Numbers do not depend on how many tokens there are."""
    return (reduce(torch.add, streams.float().unbind(1)) / streams.shape[1]).to(streams.dtype)


def _singly(streams: Tensor) -> list[Tensor]:
    return [streams[at : at + 1] for at in range(len(streams))]


def _normed(streams: Tensor, eps: float) -> Tensor:
    flat = streams.flatten(1).float()
    return flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def _added_up(weights: Tensor, streams: Tensor) -> Tensor:
    parts = [weights[:, i : i + 1] * streams[:, i] for i in range(streams.shape[1])]
    return reduce(torch.add, parts).to(streams.dtype)
