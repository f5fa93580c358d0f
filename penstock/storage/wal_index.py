"""The length of SQLite's write-ahead log, read from its index (`-shm`) without touching SQLite's locks.

POSIX releases all locks of a process on a file when the process closes any descriptor of it. If the index were opened
and closed beside SQLite, another process would take it for abandoned and truncate it under the first process's mapping,
which would crash it. So the index is opened once, and closed when this process has no connection left.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

_MOST_FRAME = 16
"""Offset of `mxFrame`, the number of pages in the log, in the header."""
_lock = threading.Lock()
_indexes: dict[str, WalIndex] = {}


class WalIndex:
    """The index of one database, shared within this process. It must be held as long as there is a connection."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._file: int | None = None
        self._holders = 0

    @classmethod
    def hold(cls, database: Path) -> WalIndex:
        """Acquires the index; call it before connecting."""
        key = os.path.realpath(database)
        with _lock:
            index = _indexes.setdefault(key, cls(key))
            index._holders += 1
        return index

    def release(self) -> None:
        """Releases the index; call it after the connection is closed."""
        with _lock:
            self._holders -= 1
            if self._holders:
                return
            _indexes.pop(self._key, None)
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def pages(self) -> int:
        """Number of pages in the log; 0 before there is one."""
        with _lock:
            if self._file is None:
                try:
                    self._file = os.open(f"{self._key}-shm", os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    return 0
            return int.from_bytes(os.pread(self._file, 4, _MOST_FRAME), sys.byteorder)
