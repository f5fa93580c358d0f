"""A bounded queue of encoded entries on disk, for when they cannot go where they belong.

A folder of numbered segments, one line per entry. Segments are replayed oldest first and removed when they have been
delivered; a crash in between delivers one twice, never none. Each process has a slot of its own under the folder, held
by a lock: a process that starts again takes over the slot, and the entries, of one that died.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

SEGMENT_BYTES = 256 * 1024
MOST_SLOTS = 1024
_MIDDLE = 10**9
"""Segments count up from here; what has to go before all of them counts down."""


class Spool:
    """One slot. Its methods touch the disk: call them off the event loop, one at a time."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._lock, self._folder = _take_slot(folder)
        self._segments: dict[int, int] = {}
        for path in self._folder.glob("*.jsonl"):
            self._segments[int(path.stem)] = path.stat().st_size
        self._open: int | None = None
        """The segment that may still grow."""

    @property
    def size(self) -> int:
        return sum(self._segments.values())

    @property
    def empty(self) -> bool:
        return not self._segments

    def append(self, lines: Sequence[bytes]) -> int:
        """Keep lines behind all others; how many fitted."""
        fitting = self._fitting(lines)
        if fitting:
            if self._open is None or self._segments[self._open] >= SEGMENT_BYTES:
                self._open = max(self._segments, default=_MIDDLE) + 1
            self._write(self._open, fitting)
        return len(fitting)

    def put_back(self, lines: Sequence[bytes]) -> int:
        """Keep lines before all others: they were taken first."""
        fitting = self._fitting(lines)
        if fitting:
            self._write(min(self._segments, default=_MIDDLE) - 1, fitting)
        return len(fitting)

    def oldest(self) -> tuple[int, list[bytes]]:
        """The segment that goes next, and its lines. Nothing is added to it any more."""
        segment = min(self._segments)
        if segment == self._open:
            self._open = None
        return segment, self._path(segment).read_bytes().splitlines()

    def drop(self, segment: int) -> None:
        """A segment was delivered."""
        self._path(segment).unlink(missing_ok=True)
        del self._segments[segment]

    def close(self) -> None:
        self._lock.close()

    def _fitting(self, lines: Sequence[bytes]) -> Sequence[bytes]:
        left = self._limit - self.size
        for count, line in enumerate(lines):
            left -= len(line) + 1
            if left < 0:
                return lines[:count]
        return lines

    def _write(self, segment: int, lines: Sequence[bytes]) -> None:
        data = b"".join(line + b"\n" for line in lines)
        with open(self._path(segment), "ab") as file:
            file.write(data)
            file.flush()
            os.fdatasync(file.fileno())
        self._segments[segment] = self._segments.get(segment, 0) + len(data)

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:010d}.jsonl"


def _take_slot(folder: Path) -> tuple[BinaryIO, Path]:
    for number in range(MOST_SLOTS):
        slot = folder / str(number)
        slot.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = open(slot / "lock", "wb")  # noqa: SIM115 - held as long as the spool
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            continue
        return lock, slot
    raise OSError(f"{folder}: all {MOST_SLOTS} slots are in use")
