"""The engine in another process, over ZeroMQ (the conversation is in `penstock.protocol.messages`).

Owns one DEALER socket, one reader task, one monitor task and one greeter task. A dead engine is noticed at
once by its closed connection, a frozen one by its silence, a restarted one by a second `Ready`; each time the
requests in flight fail with a retryable `EngineLost` and new ones wait for the next `Ready`. Nothing is sent
while the engine is away (`IMMEDIATE`), so a restarted engine never runs requests nobody waits for.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from penstock.backends.base import Clock, EngineClient, monotonic
from penstock.engine.request import Request
from penstock.protocol.codec import ProtocolError, decode_from_engine, encode
from penstock.protocol.errors import EngineLost, Overloaded
from penstock.protocol.messages import (
    HELLO_S,
    PROTOCOL_VERSION,
    Abort,
    Goodbye,
    Hello,
    Ready,
    Step,
    Stopped,
    Submit,
    ToEngine,
)
from penstock.protocol.transport import CurveClient

log = logging.getLogger("penstock.backends.native")


class NativeBackend(EngineClient):
    """Client of one engine process."""

    def __init__(
        self,
        endpoint: str,
        *,
        name: str = "0",
        curve: CurveClient | None = None,
        silence_s: float = 75.0,
        max_in_flight: int = 16384,
        max_waiters: int = 1024,
        clock: Clock = monotonic,
    ) -> None:
        """`silence_s`: an engine that says nothing for this long has lost its requests. It is longer than the
        engine's own watchdog, because an engine in a long step cannot speak."""
        super().__init__(name, max_in_flight=max_in_flight, max_waiters=max_waiters, clock=clock)
        self.endpoint = endpoint
        self._silence_s = silence_s
        self._curve = curve
        self._identity = f"gateway-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._context: zmq.asyncio.Context | None = None
        self._socket: Any = None
        self._monitor: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._heard_at = clock()

    async def start(self) -> None:
        self._context = zmq.asyncio.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._identity.encode())
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.SNDHWM, 65536)
        socket.setsockopt(zmq.RCVHWM, 0)  # the engine bounds its side; dropping here would lose tokens
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        if self._curve is not None:
            self._curve.apply(socket)  # type: ignore[arg-type]
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.connect(self.endpoint)
        self._socket = socket
        self._tasks = [
            asyncio.create_task(self._read(), name=f"engine {self.name} reader"),
            asyncio.create_task(self._watch(), name=f"engine {self.name} monitor"),
            asyncio.create_task(self._greet(), name=f"engine {self.name} greeter"),
        ]

    async def close(self) -> None:
        if self._socket is None or self._context is None:
            return
        self._try_send(Goodbye())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._went_down(EngineLost("The gateway is closing its connection to the engine."))
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()
        self._socket = None

    def _send_submit(self, request: Request) -> None:
        if not self._try_send(Submit(request)):
            raise Overloaded("The engine does not take new requests at the moment; try again shortly.")

    def _send_abort(self, request_id: str) -> None:
        if not self._try_send(Abort(request_id)):
            log.warning("abort not sent", extra={"engine": self.name, "engine_request_id": request_id})

    def _try_send(self, message: ToEngine) -> bool:
        """False when there is no connection, or its buffer is full. Never blocks."""
        try:
            # The plain socket's send: at this size and rate an await per message buys nothing.
            zmq.Socket.send(self._socket, encode(message), zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    async def _read(self) -> None:
        while True:
            frame = await self._socket.recv()
            self._heard_at = self._clock()
            try:
                message = decode_from_engine(frame)
            except ProtocolError:
                log.exception("unreadable message from engine", extra={"engine": self.name})
                continue
            match message:
                case Step(output):
                    if self.ready:
                        self._deliver(output)
                    else:
                        # It was given up for silence and still holds our registration: start over.
                        self._try_send(Goodbye())
                        self._try_send(Hello(self._identity))
                case Ready(info, version):
                    if version != PROTOCOL_VERSION:
                        log.error(
                            "engine speaks another protocol version; restart both from the same install",
                            extra={"engine": self.name, "theirs": version, "ours": PROTOCOL_VERSION},
                        )
                        continue
                    if self.ready:
                        self._lost("the engine has restarted")
                    self._came_up(info)
                    log.info("engine ready", extra={"engine": self.name, "instance": info.instance})
                case Stopped(reason):
                    self._lost(reason)

    async def _watch(self) -> None:
        while True:
            event = await recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._lost("its connection closed")
            else:
                self._try_send(Hello(self._identity))

    async def _greet(self) -> None:
        while True:
            self._try_send(Hello(self._identity))
            await asyncio.sleep(HELLO_S)
            if self.ready and self._clock() - self._heard_at > self._silence_s:
                self._lost(f"it has been silent for {self._silence_s:g} s")

    def _lost(self, why: str) -> None:
        if self.ready:
            log.warning(
                "engine lost",
                extra={"engine": self.name, "why": why, "requests_in_flight": self.in_flight},
            )
            self._went_down(EngineLost())
