"""The supervisor's control socket: gateways forward admin operations and receive the topology.

Invariant: operations run one at a time, in order of arrival, and each is answered once. An operation continues when the
gateway that sent it disconnects.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import TracebackType

import msgspec

from penstock.errors import PenstockError
from penstock.protocol.control import (
    Done,
    Drain,
    Loading,
    LoadModel,
    Operation,
    Restart,
    Scale,
    Stop,
    Topology,
    UnloadModel,
    decode_operation,
    line,
)
from penstock.supervisor.replicas import Replicas

WAITING = 64
"""Maximum of queued operations; gateways that send more are not read until one is done."""

log = logging.getLogger("penstock.supervisor")


class ControlServer:
    """The control socket of one supervisor; an async context manager."""

    def __init__(self, path: Path, replicas: Replicas) -> None:
        self._path = path
        self._replicas = replicas
        self._gateways: set[asyncio.StreamWriter] = set()
        self._waiting: asyncio.Queue[tuple[Operation, asyncio.StreamWriter]] = asyncio.Queue(WAITING)
        self._server: asyncio.Server | None = None
        self._worker: asyncio.Task[None] | None = None
        replicas.on_change = self._publish
        if replicas.catalogue is not None:
            replicas.catalogue.on_progress = self._broadcast_progress

    async def __aenter__(self) -> ControlServer:
        self._server = await asyncio.start_unix_server(self._serve_gateway, self._path)
        self._path.chmod(0o600)
        self._worker = asyncio.create_task(self._work(), name="control operations")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None and self._worker is not None
        self._server.close()
        self._worker.cancel()
        await asyncio.gather(self._worker, return_exceptions=True)
        for writer in list(self._gateways):
            writer.close()
        self._path.unlink(missing_ok=True)

    async def _serve_gateway(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._gateways.add(writer)
        writer.write(line(self._replicas.topology()))
        try:
            while sent := await reader.readline():
                await self._waiting.put((decode_operation(sent), writer))
        except (ConnectionError, ValueError, msgspec.MsgspecError) as error:
            log.error("control connection of a gateway failed", extra={"why": str(error)})
        finally:
            self._gateways.discard(writer)
            writer.close()

    def _publish(self, topology: Topology) -> None:
        self._broadcast(topology)

    def _broadcast_progress(self, model: str, phase: str, fraction: float) -> None:
        self._broadcast(Loading(model, phase, fraction))

    def _broadcast(self, message: Topology | Loading) -> None:
        for writer in self._gateways:
            writer.write(line(message))

    async def _work(self) -> None:
        for description in await self._replicas.saved_descriptions():
            try:
                await self._carry_out(LoadModel(0, description))
            except PenstockError as problem:  # it stays in the file: the next start may succeed
                log.error("a saved model could not be loaded; the next start tries again", extra={"why": str(problem)})
        while True:
            operation, sender = await self._waiting.get()
            error = ""
            try:
                await self._carry_out(operation)
            except PenstockError as problem:
                error = str(problem)
            except Exception as problem:
                log.exception("control operation failed")
                error = f"the supervisor failed: {problem}"
            if sender in self._gateways:
                sender.write(line(Done(operation.operation, error)))

    async def _carry_out(self, operation: Operation) -> None:
        match operation:
            case Scale(_, model, count):
                await self._replicas.scale(model, count)
            case Restart(_, model, replica):
                await self._replicas.restart(model, replica)
            case Drain(_, model, replica):
                await self._replicas.drain(model, replica)
            case LoadModel(_, description):
                try:
                    await self._replicas.load(description)
                finally:
                    self._broadcast(Loading(str(description.get("name", ""))))
            case UnloadModel(_, model):
                await self._replicas.unload(model)
            case Stop():
                self._replicas.stop()
