"""An engine process that `penstock serve` starts before it knows what to serve.

It imports what every engine needs and has PyTorch's libraries loaded, while the supervisor reads its configuration and
finds the models; then it is told the command line of the first engine and becomes that. Imports nothing but the
standard library, so that it costs the supervisor nothing to begin with it. Invariant: nobody depends on it. Where it
cannot be started, has died or is not needed, engines are started as always.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from penstock.interpreter import module

_ROOM = 2048
"""Characters of the command line that is to come, which then takes the place of the first one."""


class EarlyEngine:
    """The process, until it is given a command or dismissed."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self._status, writable = os.pipe()
        try:
            self._process = subprocess.Popen(
                module("penstock", "engine", "--await-command", " " * _ROOM),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(writable,),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._status)
            raise
        finally:
            os.close(writable)
        self.pid = self._process.pid
        self._status_number = str(writable)
        """Of the other end, in that process."""
        self._given = False

    def give(self, command: Sequence[str], status: str) -> tuple[subprocess.Popen[bytes], int] | None:
        """Let it run the command of an engine, in which `status` stands for the descriptor. Returns the process and the
        descriptor to read its status from; None: it cannot, start another."""
        beginning = module("penstock", "engine")
        if self._given or list(command[: len(beginning)]) != beginning or self._process.poll() is not None:
            return None
        words = [self._status_number if word == status else word for word in command]
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(words).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return None
        self._given = True
        return self._process, self._status

    def dismiss(self) -> None:
        """End it, unless it was given a command."""
        if self._given:
            return
        self._given = True
        self._process.kill()
        self._process.wait()
        os.close(self._status)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()


_early: EarlyEngine | None = None


def begin(arguments: Sequence[str]) -> None:
    """Start the process of this server, unless it would be of no use: for these arguments of `serve`, or on this
    system."""
    global _early
    if {"-h", "--help", "--cluster"} & {word.partition("=")[0] for word in arguments} or sys.platform != "linux":
        return
    if importlib.util.find_spec("torch") is None:
        return
    with suppress(OSError):
        _early = EarlyEngine()


def begun() -> EarlyEngine | None:
    """The process, if there is one."""
    return _early


def dismiss() -> None:
    """End it, if there is one that was given nothing to do."""
    if _early is not None:
        _early.dismiss()
