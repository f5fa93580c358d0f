"""How long SQLite's write-ahead log is, read from its index (`-shm`) without touching SQLite's locks.

POSIX drops every lock that a process has on a file when the process closes any descriptor of it. Were the index opened
and closed beside SQLite, another process would take it for abandoned and cut it off under the first one's mapping: it
would die of that. So the index is opened once, and closed when this process has no connection left.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

_MOST_FRAME = 16
"""Where the header has `mxFrame`: the pages in the log."""
_lock = threading.Lock()
_indexes: dict[str, WalIndex] = {}


class WalIndex:
    """Of one database, shared by all of this process. Hold it for as long as there is a connection, and no shorter."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._file: int | None = None
        self._holders = 0

    @classmethod
    def hold(cls, database: Path) -> WalIndex:
        """To be called before connecting."""
        key = os.path.realpath(database)
        with _lock:
            index = _indexes.setdefault(key, cls(key))
            index._holders += 1
        return index

    def release(self) -> None:
        """To be called when the connection is closed."""
        with _lock:
            self._holders -= 1
            if self._holders:
                return
            _indexes.pop(self._key, None)
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def pages(self) -> int:
        """Pages in the log; none before there is one."""
        with _lock:
            if self._file is None:
                try:
                    self._file = os.open(f"{self._key}-shm", os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    return 0
            return int.from_bytes(os.pread(self._file, 4, _MOST_FRAME), sys.byteorder)
