"""Which part of a model of the `transformers` library one tensor-parallel shard has (`shards` finds it)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.engine.models.transformers.attention import HeadPart

Span = tuple[int, int]
"""First and one past the last."""


Exchange = Callable[[Tensor, Tensor, Tensor, Tensor, Callable[[Tensor, Tensor, Tensor], Tensor]], Tensor]
"""Called with tokens [T, hidden], the experts chosen for each, their weights and owners [T, k], and what a shard
computes of tokens, experts and weights that come to it. Returns the sums for the shard's own tokens. All shards call it
together."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard of several."""

    index: int
    count: int
    sum: Callable[[Tensor], Tensor]
    """Adds up what all shards have. ReplicaLost where one of them is gone."""
    agree: Callable[[int], int]
    """The smallest number that any rank names, when all have come so far; raises what another one has failed with."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    exchange: Exchange | None = None
    """Where each shard has tokens of its own: takes them to the experts of others and back."""

    def span(self, size: int) -> Span:
        part = size // self.count
        return self.index * part, (self.index + 1) * part

    def any(self, flags: list[bool]) -> list[bool]:
        """Which of the flags some shard of this stage has set."""
        total = self.sum(torch.tensor([flags], dtype=torch.float32, device=self.device))
        return [bool(one > 0) for one in total[0].tolist()]


class Cuts:
    """Which part of which linear a shard has, by the names of a model's modules."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.rows: dict[str, tuple[Span, ...]] = {}
        """Of linears cut by outputs: runs of them."""
        self.columns: dict[str, Span] = {}
        """Of linears cut by inputs."""
        self.heads: dict[int, HeadPart] = {}
        """By attention call, or by layer of the cache (from 0 in this stage): which heads are the shard's."""
        self.experts: dict[str, Span] = {}
        """Of modules of experts: which are the shard's."""
        self.paged = False
        """Whether `heads` are those of attention calls, with the engine's attention."""

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        """A shard's part of a weight [out, in] or of a bias."""
        module, _, kind = name.rpartition(".")
        rows, columns = self.rows.get(module), self.columns.get(module)
        if rows is not None:
            return torch.cat([tensor[begin:end] for begin, end in rows])
        if columns is None:
            return tensor
        if kind == "bias":  # it is added to a sum
            return tensor if self.shard.index == 0 else tensor.new_zeros(tensor.shape)
        return tensor[:, slice(*columns)].contiguous()

    def sizes(self, name: str, outputs: int, inputs: int) -> tuple[int, int]:
        """Of a shard's part of a linear."""
        rows, columns = self.rows.get(name), self.columns.get(name)
        if rows is not None:
            outputs = sum(end - begin for begin, end in rows)
        return outputs, inputs if columns is None else columns[1] - columns[0]
