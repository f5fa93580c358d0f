"""Tensors between ranks on different machines: messages over a connection that someone else encrypts and routes.

Every rank of an engine that spans machines has one connection for this, to a switch on its own machine (`engine_host`);
a message says which rank it is for. Messages from one rank arrive in order; those that nobody has asked for yet wait
here, so that the connection is always read and no two ranks block each other by sending at the same time.

Collectives between machines take one path, through the group's first member: right, and slow. What is meant to cross a
network is a pipeline, which only sends and receives.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from penstock.engine.parallel.plain import tensor_bytes

HEADER = struct.Struct("<iii")
"""Before each message: the rank it is for, the rank it is from, and the group it belongs to."""


class Link:
    """One rank's messages to and from the others."""

    def __init__(self, connection: Connection, rank: int) -> None:
        self.rank = rank
        self._connection = connection
        self._sends = threading.Lock()
        self._arrived = threading.Condition()
        self._messages: dict[tuple[int, int], deque[bytes]] = {}
        self._lost = False
        threading.Thread(target=self._read, name=f"link of rank {rank}", daemon=True).start()

    def send(self, to: int, group: int, data: bytes) -> None:
        with self._sends:
            self._connection.send_bytes(HEADER.pack(to, self.rank, group) + data)

    def receive(self, source: int, group: int, timeout_s: float) -> bytes:
        """The next message of `source`; TimeoutError when none comes in time, ConnectionError when none ever will."""
        key = source, group
        deadline = time.monotonic() + timeout_s
        with self._arrived:
            while not self._messages.get(key):
                if self._lost:
                    raise ConnectionError("the link to the other machines is closed")
                left = deadline - time.monotonic()
                if left <= 0 or (not self._arrived.wait(left) and not self._messages.get(key)):
                    raise TimeoutError(f"rank {source} has sent nothing for {timeout_s:g} s")
            return self._messages[key].popleft()

    def close(self) -> None:
        self._connection.close()

    def _read(self) -> None:
        try:
            while True:
                message = self._connection.recv_bytes()
                _, source, group = HEADER.unpack_from(message)
                with self._arrived:
                    self._messages.setdefault((source, group), deque()).append(message[HEADER.size :])
                    self._arrived.notify_all()
        except (EOFError, OSError, TypeError):  # closed by the switch, or here (which makes its handle None)
            with self._arrived:
                self._lost = True
                self._arrived.notify_all()


class LinkGroup:
    """A `Group` whose members are on several machines."""

    def __init__(self, link: Link, members: Sequence[int], number: int, timeout_s: float) -> None:
        self._link = link
        self._members = members
        self._number = number
        self._timeout_s = timeout_s
        self.rank = members.index(link.rank)
        self.size = len(members)

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
