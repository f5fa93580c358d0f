"""The status messages of child processes and the pipe that carries them to the supervisor: startup progress first,
heartbeats afterwards. (`engine.process` ends a child whose supervisor died.)"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

import msgspec

from penstock.engine.request import EngineInfo
from penstock.supervisor.heartbeat import HEARTBEAT_S
from penstock.supervisor.service_manager import READY, notify


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Startup progress: the phase, and the fraction of it that is done (0..1)."""

    phase: str
    fraction: float


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The engine is listening."""

    info: EngineInfo


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """The gateway accepts connections."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Startup failed; the message is written for an operator."""

    message: str


class EncoderNeeded(msgspec.Struct, frozen=True, tag="asked"):
    """A gateway needs an encoder that is started on demand."""

    encoder: str


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Heartbeat: the engine's process is running, whatever its engine does; the gateway's event loop is running."""


Status: TypeAlias = Progress | Started | Listening | Failed | EncoderNeeded | Alive

_decoder: msgspec.json.Decoder[Status] = msgspec.json.Decoder(Status)


def decode_status(line: bytes) -> Status:
    return _decoder.decode(line)


class StatusPipe:
    """Writes status messages to the supervisor. Without a descriptor there is none: then only readiness is told, to the
    service manager if one started this process."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def send(self, status: Status) -> None:
        if self._descriptor is not None:
            os.write(self._descriptor, msgspec.json.encode(status) + b"\n")
        elif isinstance(status, Started | Listening):
            notify(READY)

    async def beat(self) -> None:
        """Sends a heartbeat every second from the event loop, so that the supervisor notices when it hangs."""
        if self._descriptor is None:
            return
        os.set_blocking(self._descriptor, False)  # a stopped supervisor must not block the event loop
        with suppress(BrokenPipeError):  # the supervisor is gone; this process is about to end too
            while True:
                with suppress(BlockingIOError):
                    self.send(Alive())
                await asyncio.sleep(HEARTBEAT_S)

    @contextmanager
    def heartbeats(self) -> Iterator[None]:
        """Sends a heartbeat every second, from a thread, because a step may take long."""
        over = threading.Event()

        def beat() -> None:
            try:
                while not over.wait(HEARTBEAT_S):
                    self.send(Alive())
            except BrokenPipeError:  # the supervisor is gone; this process is about to end too
                return

        if self._descriptor is not None:
            threading.Thread(target=beat, name="pulse", daemon=True).start()
        try:
            yield
        finally:
            over.set()
