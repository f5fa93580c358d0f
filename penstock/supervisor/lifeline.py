"""A child's side of supervision: tell the supervisor how starting goes. (Dying with it is `engine.process`.)"""

from __future__ import annotations

import os
from typing import TypeAlias

import msgspec

from penstock.engine.request import EngineInfo


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


class Asked(msgspec.Struct, frozen=True, tag="asked"):
    """Somebody needs the encoder of this name, which runs only when it is needed."""

    encoder: str


Status: TypeAlias = Progress | Started | Listening | Failed | Asked

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
