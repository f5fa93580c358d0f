"""A group whose members are on several machines.

Its collectives take the simplest path: sums through the first member, gathers from each to each. They are right, and
slow; what is meant to cross a network is a pipeline, which only sends and receives. Tensors pass through host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.parallel.groups import Group
from penstock.engine.parallel.link import Link
from penstock.engine.parallel.plain import tensor_bytes


class LinkGroup(Group):
    """Collectives over a link."""

    def __init__(self, link: Link, members: Sequence[int], number: int, timeout_s: float) -> None:
        self._link = link
        self._members = members
        self._number = number
        self._timeout_s = timeout_s
        super().__init__(None, members.index(link.rank), len(members), in_order=True)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every member's `x`, in place; the same bits everywhere."""
        if self.rank:
            self.send(x, 0)
            return self.receive(x, 0)
        part = torch.empty_like(x)
        for member in range(1, self.size):
            x += self.receive(part, member)
        for member in range(1, self.size):
            self.send(x, member)
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every member's `x`, in order; all of one shape."""
        others = [member for member in range(self.size) if member != self.rank]
        for member in others:
            self.send(x, member)
        parts = [x if member == self.rank else torch.empty_like(x) for member in range(self.size)]
        for member in others:
            self.receive(parts[member], member)
        return parts

    def broadcast(self, x: Tensor) -> Tensor:
        """The first member's `x`, written over those of all others."""
        if self.rank:
            return self.receive(x, 0)
        for member in range(1, self.size):
            self.send(x, member)
        return x

    def exchange(self, x: Tensor, counts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """See `Group.exchange`."""
        for member, rows in enumerate(torch.split(x, list(counts))):
            if member != self.rank:
                self.send(rows, member)
        out = x.new_empty(sum(sizes), *x.shape[1:])
        for member, part in enumerate(torch.split(out, list(sizes))):
            if member == self.rank:
                part.copy_(torch.split(x, list(counts))[member])
            else:
                self.receive(part, member)
        return out

    def send(self, x: Tensor, to: int) -> None:
        self._link.send(self._members[to], self._number, tensor_bytes(x))

    def receive(self, x: Tensor, source: int) -> Tensor:
        """What `source` sent, written into `x`."""
        data = self._link.receive(self._members[source], self._number, self._timeout_s)
        if len(data) != x.nbytes:
            raise ConnectionError(f"rank {self._members[source]} sent {len(data)} bytes instead of {x.nbytes}")
        if data:
            x.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(x.dtype).view(x.shape))
        return x
