"""The gateways an engine serves: which requests each owns, and the messages that it has not accepted yet.

Invariants: a request has exactly one owner until its final delta; nothing here ever blocks; the backlog of a gateway is
bounded, and a gateway that exceeds the bound, or has gone, is given up with all its requests.
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import zmq

from penstock.engine.encoder.request import Encoding
from penstock.engine.request import Delta, EngineLoad, StepOutput
from penstock.engine_host.pacer import Pacing
from penstock.protocol.codec import encode
from penstock.protocol.messages import Begun, Encoded, FromEngine, Placed, Step
from penstock.protocol.versions import BEGUN_SINCE, PLACED_SINCE, PROTOCOL_VERSION

BACKLOG_LIMIT = 4096
"""Messages kept for a gateway beyond those its socket holds: minutes of steps. Tokens cannot be skipped."""

log = logging.getLogger("penstock.protocol")


@dataclass(slots=True, eq=False)
class Peer:
    """One registered gateway."""

    identity: bytes
    name: str
    version: int = PROTOCOL_VERSION
    """Of the protocol that it speaks with this engine."""
    requests: set[str] = field(default_factory=set)
    backlog: deque[bytes] = field(default_factory=deque)
    sent_at: float = 0.0


class Peers:
    """Registration, ownership and sending. `lost` lists requests whose gateway was given up."""

    def __init__(
        self, socket: zmq.Socket[bytes], *, backlog_limit: int = BACKLOG_LIMIT, pacing: Pacing | None = None
    ) -> None:
        self._socket = socket
        self._pacing = pacing or Pacing()
        self._backlog_limit = backlog_limit
        self._peers: dict[bytes, Peer] = {}
        self._owners: dict[str, Peer] = {}
        self.lost: list[str] = []

    def get(self, identity: bytes) -> Peer | None:
        return self._peers.get(identity)

    def owner(self, request_id: str) -> Peer | None:
        return self._owners.get(request_id)

    @property
    def requests(self) -> list[str]:
        return list(self._owners)

    @property
    def flushed(self) -> bool:
        return not any(peer.backlog for peer in self._peers.values())

    def register(self, identity: bytes, name: str, version: int = PROTOCOL_VERSION) -> Peer:
        peer = self._peers[identity] = Peer(identity, name, version)
        return peer

    def own(self, peer: Peer, request_id: str) -> None:
        peer.requests.add(request_id)
        self._owners[request_id] = peer

    def disown(self, request_id: str) -> None:
        peer = self._owners.pop(request_id, None)
        if peer is not None:
            peer.requests.discard(request_id)

    def give_up(self, peer: Peer, why: str) -> None:
        """Forget a gateway; its requests go to `lost`, for the engine to abort."""
        if self._peers.pop(peer.identity, None) is None:
            return
        level = logging.WARNING if peer.requests else logging.INFO
        log.log(level, "gateway %s %s; %d of its requests are aborted", peer.name, why, len(peer.requests))
        self.lost.extend(peer.requests)
        for request_id in peer.requests:
            self._owners.pop(request_id, None)
        peer.requests.clear()
        peer.backlog.clear()

    def deliver(self, deltas: list[Delta], load: EngineLoad, now: float) -> None:
        """Deliver what is due of these and of earlier deltas (see `Pacing`)."""
        self._send_steps(self._pacing.due(deltas, load.running, now), load, now)

    def release(self, load: Callable[[], EngineLoad], now: float) -> None:
        """Deliver everything that is held, because something is about to begin that it should not wait for."""
        held = self._pacing.rest()
        if held:
            self._send_steps(held, load(), now)

    def _send_steps(self, deltas: list[Delta], load: EngineLoad, now: float) -> None:
        """One `Step` to each gateway that has something in `deltas`, first tokens first: gateways answer in this order,
        and those who wait for a first token have waited longest. A final delta ends the ownership."""
        grouped: dict[bytes, tuple[Peer, list[Delta]]] = {}
        for delta in deltas:
            peer = self._owners.get(delta.request_id)
            if peer is None:
                continue  # its gateway has gone, or was told already that it failed
            own = grouped.setdefault(peer.identity, (peer, []))[1]
            own.insert(0 if delta.cached_tokens is not None else len(own), delta)
            if delta.finish_reason is not None:
                self.disown(delta.request_id)
        for peer, own in grouped.values():
            self.send(peer, Step(StepOutput(own, load)), now)

    def tell_begun(self, request_ids: Iterable[str], now: float) -> None:
        """Tell gateways which of their requests have begun."""
        begun: dict[bytes, list[str]] = {}
        for request_id in request_ids:
            owner = self._owners.get(request_id)
            if owner is not None and owner.version >= BEGUN_SINCE:
                begun.setdefault(owner.identity, []).append(request_id)
        for identity, own in begun.items():
            self.send(self._peers[identity], Begun(own), now)

    def deliver_encodings(self, encodings: Iterable[Encoding], load: EngineLoad, now: float) -> None:
        """Send finished requests to their gateways; that ends the ownership."""
        for encoding in encodings:
            peer = self._owners.get(encoding.request_id)
            if peer is not None:
                self.disown(encoding.request_id)
                self.send(peer, Encoded([encoding], load), now)

    def heartbeat(self, load: Callable[[], EngineLoad], now: float, interval_s: float) -> None:
        """Send an empty `Step` to every gateway that got nothing for `interval_s`, and their backlog to slow ones."""
        due = [peer for peer in self._peers.values() if peer.backlog or now - peer.sent_at >= interval_s]
        for peer in due:
            if peer.backlog:
                self._flush(peer, now)
            else:
                self.send(peer, Step(StepOutput([], load())), now)

    def tell_all(self, message: FromEngine, now: float) -> None:
        for peer in list(self._peers.values()):
            self.send(peer, message, now)

    def tell_placed(self, message: Placed, sender: Peer, now: float) -> None:
        """To all but its sender. Tokens go first: a gateway with a backlog is not told."""
        for peer in list(self._peers.values()):
            if peer is not sender and peer.version >= PLACED_SINCE and not peer.backlog:
                self.send(peer, message, now)

    def send(self, peer: Peer, message: FromEngine, now: float) -> None:
        peer.backlog.append(encode(message))
        self._flush(peer, now)

    def reply(self, identity: bytes, message: FromEngine) -> None:
        """Answer a sender that is not registered; dropped when its queue is full."""
        self._try_send(identity, encode(message))

    def _flush(self, peer: Peer, now: float) -> None:
        while peer.backlog:
            failure = self._try_send(peer.identity, peer.backlog[0])
            if failure == errno.EAGAIN:
                if len(peer.backlog) > self._backlog_limit:
                    self.give_up(peer, "does not read its messages")
                return
            if failure is not None:
                self.give_up(peer, "has disconnected")
                return
            peer.backlog.popleft()
            peer.sent_at = now

    def _try_send(self, identity: bytes, frame: bytes) -> int | None:
        """None when sent, otherwise the error number (EAGAIN: its queue is full)."""
        try:
            self._socket.send_multipart([identity, frame], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            return error.errno or errno.EIO
        return None
