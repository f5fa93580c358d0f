"""Starting the process of a rank: from rank 0's process, or from the one that joined an engine on another machine."""

from __future__ import annotations

import signal
import socket
import subprocess
from contextlib import suppress
from multiprocessing.connection import Connection

from penstock import interpreter

RANK = "penstock.engine.parallel.rank"


def connection_pair() -> tuple[Connection, Connection]:
    """Both ends of a local connection."""
    ours, theirs = socket.socketpair()
    return Connection(ours.detach()), Connection(theirs.detach())


def start_rank(link: Connection | None = None, module: str = RANK) -> tuple[subprocess.Popen[bytes], Connection]:
    """A rank's process and the connection to it. `link`: the rank's end of that for tensors between machines, which is
    given away. `module`: what to run."""
    ours, theirs = connection_pair()
    given = [theirs] if link is None else [theirs, link]
    try:
        process = subprocess.Popen(
            interpreter.module(module, *(str(end.fileno()) for end in given)),
            stdin=subprocess.PIPE,
            pass_fds=[end.fileno() for end in given],
        )
    finally:
        for end in given:
            end.close()
    return process, ours


def describe_exit(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
