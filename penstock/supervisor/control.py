"""The supervisor's control socket: gateways forward admin operations and receive the topology.

Invariant: operations run one at a time, in order of arrival, and each is answered once. An operation continues when the
gateway that sent it disconnects. An operation that fails, for whatever reason, is one failed operation: it is logged
and answered, and the next one runs. Once the server stops, no operation begins.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import msgspec

from penstock.errors import PenstockError
from penstock.protocol.control import (
    Done,
    Drain,
    Following,
    Leave,
    Loading,
    LoadModel,
    Loads,
    Notice,
    Operation,
    Restart,
    Scale,
    Scaling,
    SetLimits,
    Stop,
    Topology,
    UnloadModel,
    decode_from_gateway,
    line,
)
from penstock.protocol.fleet_state import FleetState
from penstock.supervisor.replicas import Replicas

WAITING = 64
"""Maximum of queued operations; gateways that send more are not read until one is done."""

FOLLOW_S = 120.0
"""How long gateways may take to read the text files of a model that was loaded."""

log = logging.getLogger("penstock.supervisor")


class Operations(Protocol):
    """What carries out operations: the replicas of this machine, or a whole fleet."""

    async def scale(self, model: str, count: int, pool: str = "") -> None: ...
    async def restart(self, model: str, replica: str = "") -> None: ...
    async def drain(self, model: str, replica: str) -> None: ...
    def replace(self, model: str, replica: str, within_s: float, *, refill: bool = True) -> None: ...
    async def load(self, description: Mapping[str, Any]) -> None: ...
    async def unload(self, model: str) -> None: ...
    async def leave(self, machine: str, seconds: float | None) -> None: ...
    def stop(self) -> None: ...


class Scaler(Protocol):
    """What scales models automatically: this supervisor, or the controller of a fleet."""

    on_change: Callable[[Scaling], None] | None

    def governs(self, model: str, pool: str = "") -> bool: ...
    def heard(self, gateway: Hashable, loads: Loads) -> None: ...
    def lost(self, gateway: Hashable) -> None: ...
    def set_limits(self, model: str, minimum: int | None, maximum: int | None, pool: str = "") -> None: ...
    def state(self) -> Scaling: ...
    async def run(self) -> None: ...


class ControlServer:
    """The control socket of one supervisor; an async context manager."""

    def __init__(
        self,
        path: Path,
        replicas: Replicas,
        autoscaler: Scaler | None = None,
        operations: Operations | None = None,
    ) -> None:
        """`operations`: what carries them out in place of `replicas`."""
        self._path = path
        self._replicas = replicas
        self._operations: Operations = operations or replicas
        self._autoscaler = autoscaler
        self._fleet: FleetState | None = None
        self._gateways: dict[asyncio.StreamWriter, Following] = {}
        self._heard = asyncio.Event()
        """Set when a gateway has followed a topology or has gone."""
        self._waiting: asyncio.Queue[tuple[Operation, asyncio.StreamWriter]] = asyncio.Queue(WAITING)
        self._server: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        replicas.on_change = self._publish
        replicas.unserved = self._unserved
        if replicas.catalogue is not None:
            replicas.catalogue.on_progress = self._broadcast_progress
        if autoscaler is not None:
            autoscaler.on_change = self._broadcast

    async def __aenter__(self) -> ControlServer:
        self._server = await asyncio.start_unix_server(self._serve_gateway, self._path)
        self._path.chmod(0o600)
        self._tasks = [asyncio.create_task(self._work(), name="control operations")]
        if self._autoscaler is not None:
            self._tasks.append(asyncio.create_task(self._scale_by_itself(self._autoscaler), name="autoscaler"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._replicas.close()
        for writer in list(self._gateways):
            writer.close()
        self._path.unlink(missing_ok=True)

    async def _serve_gateway(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._gateways[writer] = Following(-1)
        try:
            writer.write(line(self._replicas.topology()))
            if self._autoscaler is not None:
                writer.write(line(self._autoscaler.state()))
            if self._fleet is not None:
                writer.write(line(self._fleet))
            while sent := await reader.readline():
                match decode_from_gateway(sent):
                    case Following() as following:
                        self._gateways[writer] = following
                        self._heard.set()
                    case Loads() as loads:
                        if self._autoscaler is not None:
                            self._autoscaler.heard(writer, loads)
                    case operation:
                        await self._waiting.put((operation, writer))
        except (ConnectionError, ValueError, msgspec.MsgspecError) as error:
            log.error("control connection of a gateway failed: %s", error)
        finally:
            self._gateways.pop(writer, None)
            if self._autoscaler is not None:
                self._autoscaler.lost(writer)
            self._heard.set()
            writer.close()

    async def _unserved(self, model: str, number: int) -> str:
        """Waits until all gateways have followed topology `number`; returns why one cannot serve `model`."""
        try:
            async with asyncio.timeout(FOLLOW_S):
                while any(following.number < number for following in self._gateways.values()):
                    self._heard.clear()
                    await self._heard.wait()
        except TimeoutError:
            log.warning("a gateway takes long to load %r", model)
        found = (following.problems.get(model, "") for following in self._gateways.values())
        return next((problem for problem in found if problem), "")

    def tell_fleet(self, state: FleetState) -> None:
        """The machines of the fleet, for gateways to show."""
        if state != self._fleet:
            self._fleet = state
            self._broadcast(state)

    def _publish(self, topology: Topology) -> None:
        self._broadcast(topology)

    def _broadcast_progress(self, model: str, phase: str, fraction: float) -> None:
        self._broadcast(Loading(model, phase, fraction))

    async def _scale_by_itself(self, autoscaler: Scaler) -> None:
        await self._replicas.announced()
        await autoscaler.run()

    def _broadcast(self, message: Topology | Loading | Scaling | FleetState) -> None:
        for writer in tuple(self._gateways):
            try:
                writer.write(line(message))
            except Exception as error:  # its reader ends the connection
                log.error("a gateway could not be told: %s", error)

    async def _work(self) -> None:
        for description in await self._replicas.saved_descriptions():
            # A model that cannot be loaded stays in the file: the next start may succeed.
            await self._attempt(LoadModel(0, description))
        while True:
            operation, sender = await self._waiting.get()
            error = await self._attempt(operation)
            if sender in self._gateways:
                sender.write(line(Done(operation.operation, error)))

    async def _attempt(self, operation: Operation) -> str:
        """Carries out an operation; returns why it failed."""
        name, model = type(operation).__name__, _model(operation)
        try:
            if self._replicas.stopping:
                raise PenstockError("the server is stopping")
            await self._carry_out(operation)
        except PenstockError as problem:
            log.error("%s of %r failed: %s", name, model, problem)
            return str(problem)
        except Exception as problem:
            log.exception("%s of %r failed", name, model)
            return f"the supervisor failed: {type(problem).__name__}: {problem}"
        return ""

    async def _carry_out(self, operation: Operation) -> None:
        match operation:
            case Scale(_, model, count, pool):
                if self._autoscaler is not None and self._autoscaler.governs(model, pool):
                    which = f"{model} --pool {pool}" if pool else model
                    raise PenstockError(
                        f"`{model}` is scaled automatically; `penstock autoscale {which} --min N --max N` changes its "
                        "limits"
                    )
                await self._operations.scale(model, count, pool)
            case Restart(_, model, replica):
                await self._operations.restart(model, replica)
            case Drain(_, model, replica):
                await self._operations.drain(model, replica)
            case SetLimits(_, model, minimum, maximum, pool):
                if self._autoscaler is None:
                    raise PenstockError("this server scales no model automatically")
                self._autoscaler.set_limits(model, minimum, maximum, pool)
            case Notice(_, model, replica, seconds):
                governed = self._autoscaler is not None and self._autoscaler.governs(model)
                self._operations.replace(model, replica, seconds, refill=not governed)
            case LoadModel(_, description):
                try:
                    await self._operations.load(description)
                finally:
                    self._broadcast(Loading(str(description.get("name", ""))))
            case UnloadModel(_, model):
                await self._operations.unload(model)
            case Leave(_, machine, seconds):
                await self._operations.leave(machine, seconds)
            case Stop():
                self._operations.stop()


def _model(operation: Operation) -> str:
    match operation:
        case LoadModel(_, description):
            return str(description.get("name", ""))
        case Stop():
            return ""
        case Leave(_, machine):
            return machine
        case _:
            return operation.model
