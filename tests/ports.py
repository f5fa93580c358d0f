"""Ports for servers that tests start: free when they are handed out, and still free when the server listens.

A port that the kernel chose and that was given back at once may be chosen again for a test beside, before the server
listens on it; one run of all tests asks for thousands. So a process takes a block of its own, below those from which
the kernel chooses, and holds it as long as it lives by a name that only one process can have.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

FIRST, LAST, BLOCK = 10_240, 20_000, 256


def _kernels_first() -> int:
    """The lowest port that the kernel chooses by itself."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 32_768


class _Block:
    """The ports of this process. `held`: the name that keeps others away."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.held = socket.socket(socket.AF_UNIX)
        blocks = list(range(FIRST, min(LAST, _kernels_first()) - BLOCK + 1, BLOCK))
        random.SystemRandom().shuffle(blocks)
        self.ports: Iterator[int] = itertools.repeat(0)  # where there is no block: any port, as the kernel chooses
        for first in blocks:
            try:
                self.held.bind(f"\0penstock-tests-{first}")
            except OSError:
                continue
            self.ports = itertools.cycle(range(first, first + BLOCK))
            return


_block: _Block | None = None


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses, and that no other test is given."""
    global _block
    if _block is None or _block.process != os.getpid():  # a process that was forked has its own
        _block = _Block()
    for port in itertools.islice(_block.ports, BLOCK):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("no port is free")
