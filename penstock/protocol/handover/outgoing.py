"""Blocks that other engines have asked this one for: sent in the order of asking, as soon as they are computed.

Invariants: nothing waits here. A block is sent once it is in the cache; while the request that computes it lives it may
still come; otherwise the asker is told that it never will. What is under way is bounded by the exchange's slots: a slot
is free again when the network has its bytes. Those who ask bound the rest, by asking for no more than they can take.
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import zmq

from penstock.protocol.codec import encode
from penstock.protocol.messages import Block, Pull

if TYPE_CHECKING:
    from penstock.engine.kv.exchange import BlockExchange

log = logging.getLogger("penstock.protocol")


class _Wanted(NamedTuple):
    request_id: str
    name: bytes


class _Parcel(NamedTuple):
    to: bytes
    wanted: _Wanted
    slot: int


class Outgoing:
    """Who waits for which blocks, and those on their way."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._queues: dict[bytes, deque[_Wanted]] = {}
        self._copying: deque[_Parcel] = deque()
        self._sending: deque[tuple[zmq.MessageTracker, int]] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._queues or self._copying or self._sending)

    def ask(self, identity: bytes, pull: Pull) -> None:
        queue = self._queues.setdefault(identity, deque())
        queue.extend(_Wanted(pull.request_id, name) for name in pull.names)

    def advance(self, exchange: BlockExchange | None, lives: Callable[[str], bool]) -> None:
        """Between two steps. `lives`: whether a request is still being computed."""
        while self._sending and self._sending[0][0].done:
            _, slot = self._sending.popleft()
            if exchange is not None:
                exchange.slots.append(slot)
        if exchange is None:
            self._refuse_all()
            return
        while self._copying and exchange.settled(self._copying[0].slot):
            if not self._send(exchange, self._copying[0]):
                break
            self._copying.popleft()
        for identity in list(self._queues):
            self._copy(exchange, identity, lives)

    def _copy(self, exchange: BlockExchange, identity: bytes, lives: Callable[[str], bool]) -> None:
        """Start with what is there for one asker."""
        queue, found = self._queues[identity], list[_Wanted]()
        while queue and len(found) < len(exchange.slots):
            if exchange.has(queue[0].name):
                found.append(queue.popleft())
            elif lives(queue[0].request_id) or not self._say_no(identity, queue[0]):
                break
            else:
                queue.popleft()
        if not queue:
            del self._queues[identity]
        slots = exchange.copy_out([wanted.name for wanted in found])
        self._copying.extend(_Parcel(identity, *pair) for pair in zip(found, slots, strict=True))

    def _send(self, exchange: BlockExchange, parcel: _Parcel) -> bool:
        """False: its connection takes no more now."""
        head = encode(Block(parcel.wanted.request_id, parcel.wanted.name))
        try:
            tracker = self._socket.send_multipart(
                [parcel.to, head, *exchange.memory(parcel.slot)], zmq.DONTWAIT, copy=False, track=True
            )
        except zmq.ZMQError as error:
            if error.errno == errno.EAGAIN:
                return False
            self._gone(parcel.to)
            exchange.slots.append(parcel.slot)
            return True
        assert tracker is not None
        self._sending.append((tracker, parcel.slot))
        return True

    def _say_no(self, identity: bytes, wanted: _Wanted) -> bool:
        """False: its connection takes no more now."""
        try:
            self._socket.send_multipart(
                [identity, encode(Block(wanted.request_id, wanted.name, found=False))], zmq.DONTWAIT
            )
        except zmq.ZMQError as error:
            return error.errno != errno.EAGAIN
        return True

    def _refuse_all(self) -> None:
        """This engine hands over nothing (any more)."""
        self._copying.clear()
        for identity, queue in self._queues.items():
            for wanted in queue:
                self._say_no(identity, wanted)
        self._queues.clear()

    def _gone(self, identity: bytes) -> None:
        log.info("engine %r is gone; nothing more is sent to it", identity)
        self._queues.pop(identity, None)
