"""Grammars are untrusted programs: each is compiled and tried in a process of its own before this process compiles it.

A compiled grammar cannot cross processes, so the sandbox answers only whether one is cheap: it compiled within the
limits on time and memory, and random texts that follow it showed masks that take little time. What passed is compiled
again here, which costs as much as it did there. What did not is a `GrammarError` that names the limit; the process
that tried it is dead by then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

import numpy as np

from penstock.engine.grammar.interface import (
    GrammarCompiler,
    GrammarError,
    GrammarTooComplex,
    Interrupted,
    Interruptible,
    TokenMatcher,
    Vocabulary,
    words_for,
)
from penstock.errors import PenstockError
from penstock.interpreter import module

log = logging.getLogger(__name__)

WORD = 8
_START_S = 60.0
"""Reading a large vocabulary takes seconds."""
_STOP_S = 2.0
_QUICK_S = 0.1
_NICE = 10
"""A grammar that takes longer gets only processor time that nobody else wants."""
_LOOK_S = 1.0
"""A child that takes longer is looked at: the library can lock itself up when memory runs out."""
_PATIENCE = 20.0
"""Wall-clock time for a unit of processor time, on a machine that is busy with other things."""
_TOO_BUSY = "the machine is too busy to compile grammars; try again later"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one grammar may cost."""

    compile_s: float = 1.0
    """Processor time to compile and try it."""
    memory: int = 128 << 20
    """Bytes that it may need."""
    mask_s: float = 0.05
    """Processor time to find the tokens that may come next, once."""
    masks_s: float = 0.01
    """The same on average."""


class SandboxUnavailable(PenstockError):
    """The sandbox could not be asked; nothing is known about the grammar."""


def receive(connection: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes; fewer when the other side has closed."""
    data = bytearray()
    while len(data) < size and (piece := connection.recv(min(size - len(data), 1 << 20))):
        data += piece
    return bytes(data)


def receive_frame(connection: socket.socket) -> bytes:
    """A message with its length in front; empty when the other side has closed."""
    header = receive(connection, WORD)
    return receive(connection, int.from_bytes(header, "big")) if len(header) == WORD else b""


def send_frame(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(WORD, "big") + data)


class GrammarSandbox:
    """The client of `sandbox_process`, which it starts with the first grammar and again if it should die.

    Without a vocabulary, grammars are only checked for what makes them unusable with any. Thread-safe.
    """

    def __init__(self, vocabulary: Vocabulary | None = None, size: int = 0, limits: Limits | None = None) -> None:
        self._vocabulary = vocabulary
        self._size = size
        self.limits = limits or Limits()
        self._lock = threading.Lock()
        """Held while talking to the process, which takes a millisecond; never while a grammar is tried."""
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._waiting = False
        """Whether the process has still to say that it is ready."""

    def start(self) -> None:
        """Start the process without waiting for it to be ready."""
        with self._lock:
            self._started()

    def try_out(self, grammar: str, interruptible: Interruptible | None = None) -> int:
        """Bytes that `grammar` needs when compiled; raises `GrammarError` when it cannot be used or costs too much."""
        mine, theirs = socket.socketpair()
        with mine:
            with theirs:
                child = self._spawn(theirs)
            try:
                if interruptible is not None:
                    interruptible(lambda: os.kill(child, signal.SIGKILL))
                answer = self._exchange(mine, grammar, child)
            finally:
                if interruptible is not None:
                    # From here on the child's id may belong to another process.
                    interruptible(None)
                status = self._reap(child)
        if not answer:
            raise self._death(status)
        found: dict[str, Any] = json.loads(answer)
        if "problem" in found:
            raise (GrammarTooComplex if found["costly"] else GrammarError)(found["problem"])
        return int(found["memory"])

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _exchange(self, connection: socket.socket, grammar: str, child: int) -> bytes:
        """The answer; empty when the child died."""
        deadline = monotonic() + self.limits.compile_s * _PATIENCE
        connection.settimeout(self.limits.compile_s * _PATIENCE)
        try:
            send_frame(connection, grammar.encode(errors="surrogatepass"))
            connection.settimeout(_QUICK_S)
            if not _readable(connection):
                with suppress(ProcessLookupError, PermissionError):
                    os.setpriority(os.PRIO_PROCESS, child, _NICE)
            connection.settimeout(_LOOK_S)
            slept = False
            while not _readable(connection):
                sleeps = _sleeps(child)
                if sleeps and slept:  # once may be a short wait, or just before its answer
                    raise GrammarTooComplex("it is too complex: it locked up the compiler")
                slept = sleeps
                if monotonic() > deadline:
                    raise SandboxUnavailable(_TOO_BUSY)
            return receive_frame(connection)
        except TimeoutError:
            raise SandboxUnavailable(_TOO_BUSY) from None
        except ConnectionError:
            return b""

    def _death(self, status: int) -> PenstockError:
        if os.WIFSIGNALED(status):
            match os.WTERMSIG(status):
                case signal.SIGPROF:
                    return GrammarTooComplex(
                        f"it is too complex: compiling it takes more than {self.limits.compile_s:g} s of processor time"
                    )
                case signal.SIGKILL:
                    return Interrupted("it was stopped before it was compiled")
                case signal.SIGABRT:
                    return GrammarTooComplex(
                        f"it is too complex: it needs more than {self.limits.memory >> 20} MiB of memory to compile"
                    )
                case number:
                    return GrammarTooComplex(f"it is too complex: it crashed the compiler (signal {number})")
        return GrammarTooComplex("it is too complex: the compiler stopped without a result")

    def _spawn(self, connection: socket.socket) -> int:
        """Start a child that talks through `connection`; its process id."""
        with self._lock:
            for last in (False, True):
                try:
                    control = self._ready()
                    socket.send_fds(control, [bytes(WORD)], [connection.fileno()])
                    return self._reply(control)
                except (OSError, EOFError) as error:
                    log.warning("the grammar sandbox failed and is started again: %s", error)
                    self._stop()
                    if last:
                        raise SandboxUnavailable("the grammar sandbox does not start; see the log") from error
        raise AssertionError

    def _reap(self, child: int) -> int:
        """How a child ended. One that has not is killed first."""
        with self._lock:
            if self._control is None:
                return int(signal.SIGKILL)  # closed meanwhile: its children are gone too
            try:
                os.kill(child, signal.SIGKILL)  # no effect on one that has ended: it is still unreaped
                self._control.sendall(child.to_bytes(WORD, "big"))
                return self._reply(self._control)
            except (OSError, EOFError):
                self._stop()
                return int(signal.SIGKILL)

    def _ready(self) -> socket.socket:
        """The control socket of a process that takes grammars."""
        control = self._started()
        if self._waiting:
            self._reply(control)
            self._waiting = False
        return control

    def _started(self) -> socket.socket:
        if self._control is not None:
            return self._control
        mine, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                module("penstock.engine.grammar.sandbox_process", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            )
        mine.settimeout(_START_S)
        self._control, self._waiting = mine, True
        words = self._vocabulary
        setup = {
            "limits": asdict(self.limits),
            "tokens": None if words is None else list(words.tokens),
            "special": None if words is None else words.special,
            "ends": None if words is None else words.ends,
            "size": self._size,
        }
        send_frame(mine, pickle.dumps(setup))
        return mine

    def _reply(self, control: socket.socket) -> int:
        data = receive(control, WORD)
        if len(data) < WORD:
            raise EOFError("its process ended")
        return int.from_bytes(data, "big")

    def _stop(self) -> None:
        control, self._control = self._control, None
        process, self._process = self._process, None
        self._waiting = False
        if control is not None:
            control.close()
        if process is not None:
            try:
                process.wait(_STOP_S)  # it ends its children first
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _readable(connection: socket.socket) -> bool:
    """Whether something arrived, or the other side closed, within the socket's timeout."""
    try:
        connection.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return False
    return True


def _sleeps(process: int) -> bool:
    """Whether none of the threads of a process, which has only work to do, is running or waiting for a core."""
    states = set()
    with contextlib.suppress(OSError):  # it may be about to end
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/stat") as file:
                states.add(file.read().rpartition(")")[2].split()[0])
    return states == {"S"}


class SandboxedCompiler:
    """A `GrammarCompiler` that compiles only what has passed the sandbox."""

    def __init__(self, vocabulary: Vocabulary, size: int, make: Callable[[Vocabulary], GrammarCompiler]) -> None:
        self._sandbox = GrammarSandbox(vocabulary, size)
        self._sandbox.start()
        self._inner = make(vocabulary)
        self._words = words_for(size)

    def compile(self, grammar: str, interruptible: Interruptible | None = None) -> TokenMatcher:
        memory = self._sandbox.try_out(grammar, interruptible)
        matcher = self._inner.compile(grammar)
        matcher.memory = memory
        # The first mask is the slowest, and what it finds is shared by all copies.
        self._inner.fill([self._inner.copy(matcher)], np.zeros((1, self._words), np.int32))
        return matcher

    def copy(self, matcher: TokenMatcher) -> TokenMatcher:
        return self._inner.copy(matcher)

    def fill(self, matchers: Any, masks: np.ndarray) -> None:
        self._inner.fill(matchers, masks)

    def close(self) -> None:
        self._sandbox.close()
