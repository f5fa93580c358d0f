"""Signals to the processes that an event loop started.

`asyncio.subprocess.Process.kill` may lose how a process ended: in Python 3.11 it first asks the system whether the
process is still there, which collects the exit status of one that has just ended. The event loop, which waits for the
same process, then finds none and reports 255. Here the signal is sent and nothing is asked.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress


def send(process: asyncio.subprocess.Process, number: int) -> None:
    """Send a signal, unless the process is known to have ended."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def kill(process: asyncio.subprocess.Process) -> None:
    send(process, signal.SIGKILL)
