"""A child's side of supervision: tell the supervisor how starting goes, and afterwards that the child lives. (Dying
with it is `engine.process`.)"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import msgspec

from penstock.engine.request import EngineInfo
from penstock.supervisor.heartbeat import HEARTBEAT_S


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Starting: which phase, and how much of it is done (0..1)."""

    phase: str
    fraction: float


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The engine listens."""

    info: EngineInfo


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """The gateway accepts connections."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Starting failed for a reason that a person can act on."""

    message: str


class EncoderNeeded(msgspec.Struct, frozen=True, tag="asked"):
    """Somebody needs the encoder of this name, which runs only when it is needed."""

    encoder: str


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The process runs, whatever its engine does."""


Status: TypeAlias = Progress | Started | Listening | Failed | EncoderNeeded | Alive

_decoder: msgspec.json.Decoder[Status] = msgspec.json.Decoder(Status)


def decode_status(line: bytes) -> Status:
    return _decoder.decode(line)


class StatusPipe:
    """Writes status lines to the supervisor; without a descriptor it is silent."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def send(self, status: Status) -> None:
        if self._descriptor is not None:
            os.write(self._descriptor, msgspec.json.encode(status) + b"\n")

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Say every second that this process lives: from a thread, because a step may take long."""
        over = threading.Event()

        def beat() -> None:
            try:
                while not over.wait(HEARTBEAT_S):
                    self.send(Alive())
            except BrokenPipeError:  # nobody supervises any more; this process is about to end too
                return

        if self._descriptor is not None:
            threading.Thread(target=beat, name="pulse", daemon=True).start()
        try:
            yield
        finally:
            over.set()
