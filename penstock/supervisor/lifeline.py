"""A child's side of supervision: die with the supervisor, and tell it how starting goes.

The supervisor holds the other end of the child's standard input and never writes to it. End of file means that it
is gone, even by SIGKILL, and the child ends too. On Linux the kernel is also asked to kill the child then, for one
that is too busy, or stopped, to read.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from typing import TypeAlias

import msgspec

from penstock.engine.request import EngineInfo

EXIT_ORPHANED = 71
_PR_SET_PDEATHSIG = 1


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Starting: which phase, and how much of it is done (0..1)."""

    phase: str
    fraction: float


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The engine listens."""

    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Starting failed for a reason that a person can act on."""

    message: str


Status: TypeAlias = Progress | Started | Failed

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


def die_with_supervisor() -> None:
    """Call first thing in a supervised process."""
    supervisor = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:
        os._exit(EXIT_ORPHANED)
    threading.Thread(target=_wait_for_end_of_input, name="lifeline", daemon=True).start()


def _wait_for_end_of_input() -> None:
    while os.read(0, 1024):
        pass
    os._exit(EXIT_ORPHANED)
