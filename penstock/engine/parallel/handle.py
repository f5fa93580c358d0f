"""Rank 0's end of one other rank: its process, the connection to it, and what it was asked and has not answered.

Invariant: a connection has one reader. While a rank starts that is whoever expects a report; once something was asked
it is the thread that takes replies.
"""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from penstock.engine.parallel import plain
from penstock.engine.parallel.channel import Report
from penstock.engine.parallel.layout import Place
from penstock.engine.parallel.machines import RankProcess, RemoteRank
from penstock.errors import ConfigError, PenstockError, ReplicaLost

LEAVE_S = 5.0
"""How long a rank may take to leave, and the thread that takes its replies."""


@dataclass(slots=True)
class RankHandle:
    """See above."""

    place: Place
    process: RankProcess
    connection: Connection
    remote: RemoteRank | None = None
    """The same, where it runs on another machine."""
    calls: dict[int, Future[Any]] = field(default_factory=dict)
    """Those it has not answered yet."""
    reader: threading.Thread | None = None
    """Takes its replies, once something was asked."""
    last_words: str = ""
    """Why it ended, as far as it has been heard."""
    replaced: bool = False
    """It is gone, and another was started in its place."""

    @property
    def replaceable(self) -> bool:
        """Whether it is there, or its machine is."""
        return self.remote is None or self.process.poll() is None or self.remote.replaceable

    @property
    def leaving(self) -> bool:
        """Whether it has reported why it ends, or hung up, as far as its reader knows; its process may still exit."""
        return self.reader is not None and (bool(self.last_words) or not self.reader.is_alive())

    def hang_up(self) -> None:
        """Close its connection for good: closing alone would leave it open while a thread waits for a message from it.
        That thread ends first, or it would go on with a file that is closed, or is another one by then."""
        connection, reader = self.connection, self.reader
        with suppress(OSError), socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.shutdown(socket.SHUT_RDWR)
        if reader is not None and reader is not threading.current_thread():
            reader.join(LEAVE_S)
        connection.close()

    def next_report(self) -> Report | None:
        """What it has said and nobody has heard, where it has no reader."""
        if self.reader is not None:
            return None
        with suppress(EOFError, OSError):
            while self.connection.poll():
                report = plain.receive(self.connection)
                if isinstance(report, Report):
                    self.last_words = report.problem or self.last_words
                    return report
        return None

    def last_report(self) -> str:
        """Why it is gone, as the end of a sentence; nothing where it has not said."""
        if self.reader is not None:
            self.reader.join(1.0)
        while self.next_report() is not None:
            pass
        return f": {self.last_words}" if self.last_words else ""

    def blamed(self, report: Report) -> PenstockError:
        """What to raise for a problem that it has reported."""
        return (ConfigError if report.on_purpose else ReplicaLost)(f"{self.place}: {report.problem}")
