"""A gateway's connection to its supervisor: receives the topology and passes on operations.

Owns one connection. When it ends, the supervisor has died, and this process will end too. Nothing that a message makes
happen here can end it: what fails is logged and reported to the supervisor.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.errors import PenstockError
from penstock.gateway.api.admin.supervisor import Supervisor
from penstock.protocol.control import (
    Done,
    Following,
    Loading,
    Loads,
    ModelScaling,
    Operation,
    Scaling,
    Topology,
    decode_from_supervisor,
    line,
)
from penstock.protocol.errors import InvalidRequest, ServiceUnavailable, sentence
from penstock.protocol.fleet_state import FleetState

log = logging.getLogger("penstock.gateway")

LARGEST = 2**20
"""The longest line in bytes."""

Follow = Callable[[Topology], Awaitable[dict[str, str]]]
"""Makes the models of this gateway those of a topology; returns those that cannot be served, and why."""


Scaled = Callable[[Mapping[str, ModelScaling]], None]
"""Told the state of automatic scaling whenever it changes."""


class Link(Supervisor, Protocol):
    """Says which models and replicas there are; a supervisor on this machine, or a fleet."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def report(self, loads: Loads) -> None:
        """Tells how loaded models are."""

    def draining(self) -> None:
        """This gateway takes no new requests from now on."""

    async def problem(self) -> str | None:
        """Why nothing can be answered, if it cannot."""


class SupervisorLink:
    """The connection of one gateway process."""

    def __init__(self, path: Path, follow: Follow, scaled: Scaled = lambda models: None) -> None:
        self._path = path
        self._follow = follow
        self._scaled = scaled
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Done]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.Task[None] | None = None
        self.loading: dict[str, Loading] = {}
        """Progress of the models that are being loaded."""
        self.scaling: Mapping[str, ModelScaling] = {}
        """Models that are scaled automatically."""
        self.fleet: FleetState | None = None
        """The machines, where there are several."""

    async def start(self) -> None:
        try:
            reader, self._writer = await asyncio.open_unix_connection(self._path, limit=LARGEST)
        except OSError as error:
            raise PenstockError(f"cannot reach the supervisor at {self._path}: {error.strerror}") from error
        self._reader = asyncio.create_task(self._read(reader), name="supervisor link")

    async def close(self) -> None:
        if self._reader is not None and self._writer is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._writer.close()

    async def ask(self, operation: Callable[[int], Operation]) -> None:
        """Have an operation carried out; returns when it is done, raises when it cannot be."""
        if self._writer is None or self._reader is None or self._reader.done():
            raise ServiceUnavailable("The supervisor of this server is unreachable.")
        number = next(self._numbers)
        self._waiting[number] = future = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(line(operation(number)))
            done = await future
        finally:
            del self._waiting[number]
        if done.error:
            raise InvalidRequest(sentence(done.error))

    def report(self, loads: Loads) -> None:
        """Tells the supervisor how loaded models are."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(line(loads))

    def draining(self) -> None:
        """The supervisor knows: it said so."""

    async def problem(self) -> str | None:
        return None

    async def _take_over(self, topology: Topology) -> None:
        try:
            problems = await self._follow(topology)
        except Exception as error:
            log.exception("the supervisor's models could not be taken over")
            problems = {name: f"{type(error).__name__}: {error}" for name in topology.loaded}
        assert self._writer is not None
        self._writer.write(line(Following(topology.number, problems)))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while sent := await reader.readline():
                match decode_from_supervisor(sent):
                    case Topology() as topology:
                        await self._take_over(topology)
                    case Scaling(models):
                        self.scaling = models
                        self._scaled(models)
                    case FleetState() as fleet:
                        self.fleet = fleet
                    case Loading(model, phase) as progress:
                        self.loading.pop(model, None)
                        if phase:
                            self.loading[model] = progress
                    case Done(number) as done:
                        waiting = self._waiting.get(number)
                        if waiting is not None and not waiting.done():
                            waiting.set_result(done)
        except (ConnectionError, ValueError, msgspec.MsgspecError) as error:
            log.error("the connection to the supervisor broke", extra={"why": str(error)})
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(ServiceUnavailable("The supervisor of this server has ended."))
