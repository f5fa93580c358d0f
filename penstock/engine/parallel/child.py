"""Starting the process of a rank, from rank 0's process or from the one that joined on another machine."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from penstock.engine.parallel.machines import RankProcess


@dataclass(frozen=True, slots=True)
class StartedRank:
    """A rank's process, and this side of its connections."""

    process: RankProcess
    control: Connection
    link: Connection


def start_rank(module: str = "penstock.engine.parallel.rank", link: Connection | None = None) -> StartedRank:
    raise NotImplementedError


def describe_exit(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
