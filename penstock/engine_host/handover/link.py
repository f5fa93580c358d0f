"""A connection from one engine to another that computes prompts for it. Belongs to the fetching thread.

The other engine sees an ordinary client: `Hello`, `Submit`, `Abort`, and `Pull` for the blocks. Invariant: nothing is
requested before the other side has introduced itself (`Ready`) and its blocks were found usable here; when the
connection ends, everything that was being fetched over it fails at once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from penstock.engine.request import EngineInfo, Handover
from penstock.errors import ConfigError
from penstock.protocol.codec import encode
from penstock.protocol.messages import Goodbye, Hello, Ready, ToEngine
from penstock.protocol.transport import CurveClient
from penstock.protocol.versions import Proposal

if TYPE_CHECKING:
    from penstock.engine_host.handover.fetcher import Fetch

log = logging.getLogger("penstock.protocol")


class Link:
    """Another engine, and what is being fetched from it."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], to: Handover, *, own: EngineInfo, secret_key: str
    ) -> None:
        """`secret_key`: this engine's own, which the other one must admit where its endpoint is encrypted. Raises
        `ConfigError` when it cannot be reached like this."""
        if to.public_key and not secret_key:
            raise ConfigError(f"{to.endpoint} is encrypted, and this engine has no key (--curve-key)")
        self.fetches: dict[str, Fetch] = {}
        self.up = False
        """Whether it has introduced itself, and can be used."""
        self.problem = ""
        """Why it cannot be, if that is known."""
        self.used = 0.0
        """When something was last fetched over it."""
        self.steps = 0
        """Its steps so far, as last reported."""
        self._endpoint = to.endpoint
        self._own = own
        self._proposal = Proposal()
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, f"engine-{own.instance}".encode())
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.RCVHWM, 0)  # no more arrives than was asked for
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self.monitor: Any = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            if to.public_key:
                CurveClient(to.public_key, secret_key).apply(self.socket)
            self.socket.connect(to.endpoint)
        except (zmq.ZMQError, ValueError) as error:
            self._drop()
            raise ConfigError(f"cannot connect to {to.endpoint}: {error}") from error

    def send(self, message: ToEngine) -> bool:
        try:
            self.socket.send(encode(message), zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def say_hello(self) -> None:
        self.send(Hello(f"engine {self._own.instance}", self._proposal.version))

    def watch(self) -> str:
        """Follow the connection; returns why it was lost, if it was."""
        lost = ""
        while self.monitor.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            event = parse_monitor_message(self.monitor.recv_multipart(zmq.DONTWAIT))["event"]
            if event == zmq.EVENT_DISCONNECTED:
                lost, self.up = "its connection closed", False
            else:
                self._proposal.again()
                self.say_hello()
        return lost

    def introduced(self, ready: Ready) -> None:
        """The other engine has described itself. Engines that differ must not read each other's blocks."""
        theirs, ours = ready.info.kv_format, self._own.kv_format
        if not self._proposal.agreed(ready.version):
            self.problem = self._proposal.problem
            if not self.problem:
                self.say_hello()
                return
        elif theirs != ours:
            self.problem = f"its blocks cannot be used here: it has {theirs or 'none to give'}; this engine has {ours}"
        else:
            self.problem = ""
        self.up = not self.problem
        if self.problem:
            log.error("the engine at %s cannot compute prompts for this one: %s", self._endpoint, self.problem)
        else:
            log.info("the engine at %s computes prompts for this one", self._endpoint)

    def close(self) -> None:
        self.send(Goodbye())
        self._drop()

    def _drop(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()
