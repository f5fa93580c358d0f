"""The handover side of an engine's server: blocks sent to other engines, and requests that wait for blocks.

An engine's role decides which of the two it does; with role `both` it does neither, and nothing here costs anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import zmq

from penstock.engine.request import Delta, Request
from penstock.engine_host.handover.inbound import Incoming
from penstock.engine_host.handover.outbound import Outgoing
from penstock.engine_host.interfaces import EngineLike
from penstock.errors import ConfigError, ReplicaLost
from penstock.protocol.messages import Pull

if TYPE_CHECKING:
    from penstock.engine.kv.exchange import BlockExchange

log = logging.getLogger("penstock.protocol")

POLL_S = 0.001
"""How often copies and sends are polled whose completion is not signalled."""


@runtime_checkable
class BlockHost(Protocol):
    """An engine that may hand blocks over."""

    @property
    def exchange(self) -> BlockExchange | None: ...

    def when_all_are_there(self, act: Callable[[], None]) -> None:
        """Do something that needs all ranks, unless one of them is being started again."""
        ...


class HandoverEndpoint:
    """Both directions of handover for one engine."""

    def __init__(self, poller: zmq.Poller, socket: zmq.Socket[bytes], secret_key: str) -> None:
        """`poller`: what the server waits on. `socket`: where other engines ask for blocks. `secret_key`: this engine's
        own, for encrypted connections to others; may be empty."""
        self._poller = poller
        self._outgoing = Outgoing(socket)
        self._incoming: Incoming | None = None
        self._secret_key = secret_key
        self._problem: str | None = None
        """Why there is no memory for blocks; empty: there is some; None: nobody has asked yet."""

    @property
    def open(self) -> bool:
        """Whether there was ever a handover: `advance` does nothing otherwise."""
        return self._incoming is not None or self._outgoing.busy

    @property
    def busy(self) -> bool:
        """Whether requests wait for blocks, blocks are being sent, or more of them will probably be asked for soon."""
        giving = self._outgoing.busy or self._outgoing.expecting
        return giving or (self._incoming is not None and self._incoming.waiting > 0)

    def patience(self, longest_s: float) -> float:
        """How long the server may wait for messages."""
        pressing = self._incoming is not None and self._incoming.pressing
        return min(POLL_S, longest_s) if pressing or self._outgoing.busy else longest_s

    def begin(self, engine: EngineLike, request: Request) -> bool:
        """Whether the request waits for blocks of another engine; otherwise the engine takes it now."""
        if request.handover is None or engine.info.role != "decode" or not isinstance(engine, BlockHost):
            return False
        exchange = engine.exchange
        try:
            if exchange is None or not self._has_slots(exchange):
                return False
        except ReplicaLost:
            return False
        if self._incoming is None:
            self._incoming = Incoming(exchange, engine.info, self._secret_key)
            self._poller.register(self._incoming.fetcher.wake, zmq.POLLIN)
        return self._incoming.begin(request)

    def pull(self, identity: bytes, message: Pull) -> None:
        self._outgoing.ask(identity, message)

    def advance(self, engine: EngineLike, lives: Callable[[str], bool]) -> list[Request]:
        """Called between two steps; returns requests for the engine to take. `lives`: whether a request still runs."""
        if isinstance(engine, BlockHost):
            engine.when_all_are_there(partial(self._copy, engine, lives))
        elif self._outgoing.busy:
            self._outgoing.advance(None, lives)
        return self._incoming.gone() if self._incoming is not None else []

    def take_begun(self) -> list[str]:
        """Requests that might not wait long and have been begun by another engine since this was last asked."""
        if self._incoming is None or not self._incoming.begun:
            return []
        begun, self._incoming.begun = self._incoming.begun, []
        return begun

    def _copy(self, engine: EngineLike, lives: Callable[[str], bool]) -> None:
        if self._outgoing.busy:
            exchange = engine.exchange if isinstance(engine, BlockHost) and engine.info.role == "prefill" else None
            self._outgoing.advance(exchange if exchange is not None and self._has_slots(exchange) else None, lives)
        if self._incoming is not None:
            self._incoming.take_in()

    def _has_slots(self, exchange: BlockExchange) -> bool:
        """Whether there is memory for blocks in transit; it is taken at the first handover."""
        if self._problem is None:
            self._problem = ""
            try:
                exchange.free_slots()
            except ConfigError as error:
                self._problem = str(error)
                log.error("no blocks are handed over: %s", error)
            except ReplicaLost:
                self._problem = None  # until the rank is there again
                raise
        return not self._problem

    def cancel(self, request_id: str) -> bool:
        """Cancel a request that waits for blocks; returns whether there was one."""
        return self._incoming is not None and self._incoming.cancel(request_id)

    def settle(self, deltas: Iterable[Delta]) -> None:
        if self._incoming is not None:
            self._incoming.settle(deltas)

    def close(self) -> None:
        """The engine stops, or goes to sleep."""
        if self._incoming is not None:
            self._poller.unregister(self._incoming.fetcher.wake)
            self._incoming.close()
            self._incoming = None
        self._problem = None  # the engine that wakes is another
