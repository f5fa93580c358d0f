"""A bounded queue of encoded entries on disk, for entries that the sink cannot accept now.

A folder of numbered segments, one line per entry. Segments are replayed oldest first and deleted after delivery; a
crash in between delivers a segment twice, never not at all. Each process has its own slot under the folder, held by a
lock: a restarted process takes over the slot and the entries of one that died.
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
"""Segment numbers count up from here; segments put back in front count down."""


class Spool:
    """One slot. Its methods access the disk: call them off the event loop, one at a time."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._lock, self._folder = _take_slot(folder)
        self._segments: dict[int, int] = {}
        for path in self._folder.glob("*.jsonl"):
            self._segments[int(path.stem)] = path.stat().st_size
        self._open: int | None = None
        """The segment that is still open for appending."""

    @property
    def size(self) -> int:
        return sum(self._segments.values())

    @property
    def empty(self) -> bool:
        return not self._segments

    def append(self, lines: Sequence[bytes]) -> int:
        """Appends lines; returns how many fitted."""
        fitting = self._fitting(lines)
        if fitting:
            if self._open is None or self._segments[self._open] >= SEGMENT_BYTES:
                self._open = max(self._segments, default=_MIDDLE) + 1
            self._write(self._open, fitting)
        return len(fitting)

    def put_back(self, lines: Sequence[bytes]) -> int:
        """Puts lines back in front of all others, because they were taken first."""
        fitting = self._fitting(lines)
        if fitting:
            self._write(min(self._segments, default=_MIDDLE) - 1, fitting)
        return len(fitting)

    def oldest(self) -> tuple[int, list[bytes]]:
        """The next segment to deliver, and its lines; it is closed for appending."""
        segment = min(self._segments)
        if segment == self._open:
            self._open = None
        return segment, self._path(segment).read_bytes().splitlines()

    def drop(self, segment: int) -> None:
        """Deletes a delivered segment."""
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
