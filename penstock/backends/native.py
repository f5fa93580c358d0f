"""The client of an engine in another process, over ZeroMQ (protocol: `penstock.protocol.messages`).

Owns one DEALER socket, read by event loop callbacks, and one heartbeat task. A dead engine is detected at once by its
closed connection, a frozen one by its silence, a restarted one by a second `Ready`; each time the requests in flight
fail with a retryable `EngineLost` and new ones wait for the next `Ready`. Nothing is sent while the engine is down
(`IMMEDIATE`), so a restarted engine never runs requests that have no reader.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from penstock.backends.base import Clock, EngineClient, monotonic
from penstock.engine.request import Request
from penstock.protocol.codec import ProtocolError, decode_from_engine, encode
from penstock.protocol.errors import ApiError, EngineLost, EngineUnavailable, Overloaded
from penstock.protocol.messages import (
    HELLO_S,
    Abort,
    AdapterOperation,
    AdapterResult,
    Adapters,
    Begun,
    Claim,
    Claimed,
    Count,
    Counted,
    Erase,
    Erased,
    FromEngine,
    Goodbye,
    Hello,
    Leaving,
    Placed,
    Placement,
    Produced,
    Ready,
    Sleep,
    State,
    Step,
    Stopped,
    Submit,
    ToEngine,
    Wake,
)
from penstock.protocol.transport import CurveClient, set_heartbeats
from penstock.protocol.versions import BEGUN_SINCE, ERASE_SINCE, PLACED_SINCE, Proposal

log = logging.getLogger("penstock.backends.native")

MACHINE_SILENCE_S = 10.0
"""A TCP connection on which nothing arrives for so long is lost: the process, its machine or the way there is gone."""
_ARRIVED = int(zmq.POLLIN)
"""A plain int, because enum flags are slow to combine."""


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
        """`silence_s`: silence after which the engine counts as lost. It is longer than the engine's own watchdog,
        because an engine in a long step cannot send."""
        super().__init__(name, max_in_flight=max_in_flight, max_waiters=max_waiters, clock=clock)
        self.endpoint = endpoint
        self._silence_s = silence_s
        self._curve = curve
        self._identity = f"gateway-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: Any = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._heard_at = clock()
        self._questions: dict[str, asyncio.Future[Any]] = {}
        self._asked: tuple[str, float] | None = None
        """The question that measures the round trip, while it is not answered, and when it was sent."""
        self._local = endpoint.startswith(("ipc://", "inproc://"))
        self._proposal = Proposal()
        self._hello_at = float("-inf")
        self._registering = False
        """Whether it has said goodbye and hello, and is not registered yet."""

    @property
    def protocol(self) -> int:
        """The version of the protocol that is spoken with the engine."""
        return self._proposal.version

    @property
    def tells_begun(self) -> bool:
        return self._proposal.version >= BEGUN_SINCE

    @property
    def public_key(self) -> str:
        """The engine's public key, if its endpoint is encrypted."""
        return "" if self._curve is None else self._curve.server_public_key

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._identity.encode())
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.SNDHWM, 65536)
        socket.setsockopt(zmq.RCVHWM, 0)  # the engine bounds its side; dropping here would lose tokens
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        if self._curve is not None:
            self._curve.apply(socket)
        if self.endpoint.startswith("tcp://"):
            # A machine that is gone closes no connection; libzmq answers also while a long step runs.
            set_heartbeats(socket, MACHINE_SILENCE_S)
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._loop.add_reader(self._monitor.fileno(), self._on_monitor)
        self._loop.add_reader(socket.fileno(), self._on_socket)
        socket.connect(self.endpoint)
        self._on_monitor()
        self._heartbeat = asyncio.create_task(self._send_hellos(), name=f"engine {self.name} heartbeat")

    async def close(self) -> None:
        if self._socket is None or self._context is None or self._loop is None:
            return
        self._try_send(Goodbye())
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            await asyncio.gather(self._heartbeat, return_exceptions=True)
        self._went_down(EngineLost("The gateway is closing its connection to the engine."))
        socket, monitor = self._socket, self._monitor
        self._loop.remove_reader(socket.fileno())
        self._loop.remove_reader(monitor.fileno())
        self._socket = None
        socket.disable_monitor()
        monitor.close()
        socket.close()
        await asyncio.to_thread(self._context.term)  # waits for the goodbye to leave, up to LINGER

    async def produced(self, charges: Sequence[str]) -> list[Produced]:
        if not self._up:
            raise EngineUnavailable("The engine for this model is restarting; try again.")
        entries: list[Produced] = await self._ask(Count(self._next_operation(), list(charges)))
        return entries

    async def claim(self, charge: str, request: Request) -> Claimed:
        if not self._up:
            return Claimed("")
        claimed: Claimed = await self._ask(Claim(self._next_operation(), charge, request))
        return claimed

    async def erase(self, owner: str) -> dict[str, Erased]:
        if not self._up:
            return {self.name: Erased("", error="the engine is not up")}
        if self._proposal.version < ERASE_SINCE:
            return {self.name: Erased("", error="the engine is of a release that cannot erase; upgrade it")}
        try:
            erased: Erased = await self._ask(Erase(self._next_operation(), owner))
        except ApiError as error:
            erased = Erased("", error=error.message)
        return {self.name: erased}

    async def _ask(self, question: Count | Claim | Erase) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._questions[question.question] = answer
        try:
            if not self._try_send(question):
                raise Overloaded("The engine accepts no messages at the moment; try again shortly.")
            return await answer
        finally:
            del self._questions[question.question]

    def _went_down(self, error: ApiError) -> None:
        super()._went_down(error)
        self._asked = None
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(error)

    def _send_submit(self, request: Request) -> None:
        if not self._try_send(Submit(request)):
            # It has just died, and nobody has noticed yet: the request may wait for it as for any engine that is away.
            raise EngineUnavailable("The engine takes no messages at the moment; try again shortly.")

    def _send_abort(self, request_id: str, resumable: bool = False) -> None:
        if not self._try_send(Abort(request_id, resumable)):
            log.warning(
                "abort could not be sent to the engine", extra={"engine": self.name, "engine_request_id": request_id}
            )

    def _send_state(self, message: Sleep | Wake) -> None:
        if not self._try_send(message):
            raise Overloaded("The engine accepts no new requests at the moment; try again shortly.")

    def _send_operation(self, operation: AdapterOperation) -> None:
        if not self._try_send(operation):
            raise Overloaded("The engine accepts no new requests at the moment; try again shortly.")

    def tell_placement(self, placement: Placement) -> None:
        # When it cannot be sent, another gateway may choose another replica: that costs a prefill, nothing else.
        if self._up and self._proposal.version >= PLACED_SINCE:
            self._try_send(Placed([placement]))

    def _say_hello(self) -> None:
        self._hello_at = self._clock()
        self._try_send(Hello(self._identity, self._proposal.version))

    def _try_send(self, message: ToEngine) -> bool:
        """Sends a message; False when there is no connection or its buffer is full. Never blocks."""
        assert self._socket is not None and self._loop is not None
        try:
            self._socket.send(encode(message), zmq.DONTWAIT)
        except zmq.Again:
            return False
        finally:
            # A send may consume the signal of an arrived message, because the descriptor is edge-triggered.
            if int(self._socket.getsockopt(zmq.EVENTS)) & _ARRIVED:
                self._loop.call_soon(self._on_socket)
        return True

    def _on_socket(self) -> None:
        # Checked first: the exception of an empty receive costs more than a message.
        while self._socket is not None and int(self._socket.getsockopt(zmq.EVENTS)) & _ARRIVED:
            frame = self._socket.recv(zmq.DONTWAIT)
            self._heard_at = self._clock()
            try:
                self._on_message(decode_from_engine(frame))
            except ProtocolError:
                log.exception("unreadable message from engine", extra={"engine": self.name})

    def _on_message(self, message: FromEngine) -> None:
        match message:
            case Step(output):
                if self._up:
                    self._deliver(output)
                elif not self._registering:
                    # It was given up after a silence but still has our registration: register again. Once, however
                    # much it had sent: a second answer would end the requests that came after the first.
                    self._registering = self._try_send(Goodbye())
                    self._say_hello()
            case Begun(request_ids):
                self.on_begun(request_ids)
            case Ready():
                self._on_ready(message)
            case State():
                self._on_state(message)
            case Adapters(statuses):
                self._tell_adapters(statuses)
            case AdapterResult():
                self._finish_operation(message)
            case Leaving():
                log.info("engine is draining", extra={"engine": self.name, "requests_in_flight": self.in_flight})
                self._leaves()
            case Counted(question, entries):
                self._answered(question, entries)
            case Claimed(question) | Erased(question):
                self._answered(question, message)
            case Placed(placements):
                for placement in placements:
                    self.on_placement(placement)
            case Stopped(reason):
                self._lost(reason)

    def _on_ready(self, ready: Ready) -> None:
        if self._proposal.agreed(ready.version):
            self.problem = ""
            self._registering = False
            self._lost("it was restarted")
            self._came_up(ready.info, ready.state)
            extra = {"engine": self.name, "instance": ready.info.instance, "protocol": ready.version}
            log.info("engine ready", extra=extra)
        elif not self._proposal.problem:
            self._say_hello()
        elif self.problem != self._proposal.problem:  # it answers every hello
            self.problem = self._proposal.problem
            log.error("engine cannot be used", extra={"engine": self.name, "why": self.problem})

    def _answered(self, question: str, answer: list[Produced] | Claimed | Erased) -> None:
        if self._asked is not None and question == self._asked[0]:
            self.round_trip.measured(self._clock() - self._asked[1])
            self._asked = None
            return
        asked = self._questions.get(question)
        if asked is not None and not asked.done():
            asked.set_result(answer)

    def _on_monitor(self) -> None:
        while self._socket is not None and self._monitor.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))["event"]
            if event == zmq.EVENT_DISCONNECTED:
                self._registering = False
                self._lost("its connection was closed")
            else:
                self._proposal.again()
                self._say_hello()

    async def _send_hellos(self) -> None:
        while True:
            # Not twice in a row: while versions are being agreed on, every hello is answered.
            if self._clock() - self._hello_at > HELLO_S / 2:
                self._say_hello()
            self._measure_round_trip()
            await asyncio.sleep(HELLO_S)
            # An engine that is waking loads its weights and cannot send meanwhile.
            silent = self.state != "waking" and self._clock() - self._heard_at > self._silence_s
            if self._up and silent:
                self._lost(f"it was silent for {self._silence_s:g} s")

    def _measure_round_trip(self) -> None:
        """Asks about no charges: the cheapest question that every engine answers."""
        if self._up and self._asked is None and not self._local:
            question = Count(self._next_operation(), [])
            if self._try_send(question):
                self._asked = (question.question, self._clock())

    def _lost(self, why: str) -> None:
        if self._up:
            log.warning(
                "engine lost; its requests move to other replicas or wait for its restart",
                extra={"engine": self.name, "why": why, "requests_in_flight": self.in_flight},
            )
            self._went_down(EngineLost())
