"""Blocks that other engines have asked this one for: sent in the order of asking, as soon as they are computed.

Invariants: nothing here blocks. A block is sent once it is in the cache; it may still come while the request that
computes it runs, also once more after a rank was lost; otherwise the asker is told that it never will. Blocks in
transit are bounded by the exchange's slots: a slot is free again when the network has its bytes. Askers bound their
queues by asking for no more than they can take.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import zmq

from penstock.engine.kv.block_hash import is_state
from penstock.errors import ReplicaLost
from penstock.protocol.codec import encode
from penstock.protocol.messages import Block, Pull

if TYPE_CHECKING:
    from penstock.engine.kv.exchange import BlockExchange

log = logging.getLogger("penstock.protocol")

LINGER_S = 0.5
"""An asker has room for a few blocks at a time, so more requests are expected until none came for this long."""


class _Asker(NamedTuple):
    identity: bytes
    request_id: str


class _Parcel(NamedTuple):
    to: _Asker
    name: bytes
    slot: int


class Outgoing:
    """Which blocks each asker waits for, and the blocks in transit."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._queues: dict[_Asker, deque[bytes]] = {}
        self._copying: deque[_Parcel] = deque()
        self._sending: list[tuple[zmq.MessageTracker, int]] = []
        self._active = -LINGER_S
        self._losses = 0
        """Of the exchange, so far; see there."""

    @property
    def expecting(self) -> bool:
        """Whether an asker will probably ask for more."""
        return time.monotonic() - self._active < LINGER_S

    @property
    def busy(self) -> bool:
        return bool(self._queues or self._copying or self._sending)

    def ask(self, identity: bytes, pull: Pull) -> None:
        self._queues.setdefault(_Asker(identity, pull.request_id), deque()).extend(pull.names)
        self._active = time.monotonic()

    def advance(self, exchange: BlockExchange | None, lives: Callable[[str], bool]) -> None:
        """Called between two steps. `lives`: whether a request is still being computed."""
        if exchange is None:
            self._refuse_all()
            return
        self._active = time.monotonic()
        if self._losses != exchange.losses:
            self._losses = exchange.losses
            self._start_over(exchange)
        sending, self._sending = self._sending, []
        for tracker, slot in sending:
            if tracker.done:
                exchange.give_back(slot)
            else:
                self._sending.append((tracker, slot))
        for asker in list(self._queues):
            self._copy(exchange, asker, lives)
        while self._copying and exchange.is_idle(self._copying[0].slot):
            if not self._send(exchange, self._copying[0]):
                break
            self._copying.popleft()

    def _copy(self, exchange: BlockExchange, asker: _Asker, lives: Callable[[str], bool]) -> None:
        """Start copying what is ready for one asker, which then goes to the end of the line."""
        queue, found = self._queues.pop(asker), list[bytes]()
        taken = [0, 0]  # blocks, and states
        while queue and taken[is_state(queue[0])] < exchange.room(queue[0]):
            if exchange.has(queue[0]):
                taken[is_state(queue[0])] += 1
                found.append(queue.popleft())
            elif lives(asker.request_id) or not self._refuse(asker, queue[0]):
                break
            else:
                queue.popleft()
        if queue:
            self._queues[asker] = queue
        if found:
            try:
                slots = exchange.copy_out(found)
            except ReplicaLost:
                self._queues[asker] = deque((*found, *queue))
                raise
            self._copying.extend(_Parcel(asker, *pair) for pair in zip(found, slots, strict=True))

    def _start_over(self, exchange: BlockExchange) -> None:
        """What was being copied is lost. Blocks of a request that still runs are computed again."""
        while self._copying:
            parcel = self._copying.pop()
            self._queues.setdefault(parcel.to, deque()).appendleft(parcel.name)
            exchange.give_back(parcel.slot)

    def _send(self, exchange: BlockExchange, parcel: _Parcel) -> bool:
        """False when the connection accepts no more now."""
        head = encode(Block(parcel.to.request_id, parcel.name))
        try:
            tracker = self._socket.send_multipart(
                [parcel.to.identity, head, *exchange.memory(parcel.slot)], zmq.DONTWAIT, copy=False, track=True
            )
        except zmq.ZMQError as error:
            if error.errno == errno.EAGAIN:
                return False
            log.info("engine %r has disconnected; its blocks are dropped", parcel.to.identity)
            self._queues.pop(parcel.to, None)
            exchange.give_back(parcel.slot)
            return True
        assert tracker is not None
        self._sending.append((tracker, parcel.slot))
        return True

    def _refuse(self, asker: _Asker, name: bytes) -> bool:
        """False when the connection accepts no more now."""
        try:
            self._socket.send_multipart(
                [asker.identity, encode(Block(asker.request_id, name, found=False))], zmq.DONTWAIT
            )
        except zmq.ZMQError as error:
            return error.errno != errno.EAGAIN
        return True

    def _refuse_all(self) -> None:
        """This engine has no blocks to hand over (any more)."""
        self._copying.clear()
        self._sending.clear()
        for asker, queue in self._queues.items():
            for name in queue:
                self._refuse(asker, name)
        self._queues.clear()
