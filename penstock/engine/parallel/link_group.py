"""A group whose members are on several machines.

Its collectives take the simplest path: sums through the first member, gathers from each to each. They are right, and
slow; what is meant to cross a network is a pipeline, which only sends and receives. Tensors pass through host memory.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.parallel.groups import Group, Transfer
from penstock.engine.parallel.link import Link
from penstock.engine.parallel.plain import tensor_bytes


class LinkGroup(Group):
    """Collectives over a link."""

    def __init__(self, link: Link, members: Sequence[int], name: str, timeout_s: float) -> None:
        self._link = link
        self._members = members
        self._name = name
        self.number = self._numbered(link.generation)
        self._timeout_s = timeout_s
        self._posted: dict[int, deque[_Receive]] = {}
        super().__init__(None, members.index(link.rank), len(members), in_order=True)

    def _numbered(self, generation: int) -> int:
        """What messages of the group are known by: none of an earlier generation may be taken for one of a later."""
        return zlib.crc32(f"{self._name}/{generation}".encode()) >> 1

    def renew(self, generation: int) -> None:
        """The members meet again; nothing that was under way arrives."""
        self.number = self._numbered(generation)
        self._posted.clear()

    @property
    def needs_host(self) -> bool:
        return True

    def sum(self, x: Tensor) -> Tensor:
        """See `Group.sum`; the same bits everywhere."""
        if self.rank:
            self._send(x, 0)
            return self._receive(x, 0)
        part = torch.empty_like(x)
        for member in range(1, self.size):
            x += self._receive(part, member)
        for member in range(1, self.size):
            self._send(x, member)
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """See `Group.gather`."""
        others = [member for member in range(self.size) if member != self.rank]
        for member in others:
            self._send(x, member)
        parts = [x if member == self.rank else torch.empty_like(x) for member in range(self.size)]
        for member in others:
            self._receive(parts[member], member)
        return parts

    def broadcast(self, x: Tensor) -> Tensor:
        """See `Group.broadcast`."""
        if self.rank:
            return self._receive(x, 0)
        for member in range(1, self.size):
            self._send(x, member)
        return x

    def exchange(self, x: Tensor, counts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """See `Group.exchange`."""
        rows = torch.split(x, list(counts))
        for member, part in enumerate(rows):
            if member != self.rank:
                self._send(part, member)
        out = x.new_empty(sum(sizes), *x.shape[1:])
        for member, part in enumerate(torch.split(out, list(sizes))):
            if member == self.rank:
                part.copy_(rows[member])
            else:
                self._receive(part, member)
        return out

    def begin_send(self, x: Tensor, to: int) -> Transfer:
        """See `Group.begin_send`. The tensor is on its way when this returns."""
        self._link.send(self._members[to], self.number, tensor_bytes(x))
        return _SENT

    def begin_receive(self, x: Tensor, source: int) -> Transfer:
        """See `Group.begin_receive`."""
        posted = self._posted.setdefault(source, deque())
        receive = _Receive(self, x, source)
        posted.append(receive)
        return receive

    def complete(self, receive: _Receive) -> None:
        """Wait for what a receive was posted for, and for all that were posted before it."""
        posted = self._posted[receive.source]
        while receive in posted:
            self._fill(posted[0].x, receive.source)
            posted.popleft()

    def _send(self, x: Tensor, to: int) -> None:
        self.begin_send(x, to)

    def _receive(self, x: Tensor, source: int) -> Tensor:
        self.begin_receive(x, source).wait()
        return x

    def _fill(self, x: Tensor, source: int) -> None:
        data = self._link.receive(self._members[source], self.number, self._timeout_s)
        if len(data) != x.nbytes:
            raise ConnectionError(f"rank {self._members[source]} sent {len(data)} bytes instead of {x.nbytes}")
        if data:
            x.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(x.dtype).view(x.shape))


class _Sent:
    def wait(self) -> None:
        """It has left."""


class _Receive:
    def __init__(self, group: LinkGroup, x: Tensor, source: int) -> None:
        self.x = x
        self.source = source
        self._group = group

    def wait(self) -> None:
        self._group.complete(self)


_SENT = _Sent()
