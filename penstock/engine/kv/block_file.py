"""KV blocks in a file: one rank's part of each, at a place of its own, read and written by threads.

A file holds what tenants said, so nobody else can open it: it has no name (on filesystems that cannot do that, it
loses its name at once), and is gone when the process is, however that ended.

Invariant: what is read is what was written. The sum of every block is kept in memory; a block that comes back with
another one, from a damaged or truncated file, counts as not read.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from penstock.engine.kv.mover import BlockMover
from penstock.errors import ConfigError

_PREFIX = "penstock-kv-"
Pairs = list[tuple[int, int]]
"""Slots in host memory and places in the file."""


class BlockFile:
    """`places` blocks on disk. One thread writes, another reads, each in the order it was told."""

    def __init__(self, folder: Path, places: int, mover: BlockMover) -> None:
        """`mover`: owns the slots of host memory that blocks come from and go to."""
        self._mover = mover
        self._block_bytes = sum(map(len, mover.memory(0)))
        self._file = _open(folder, places * self._block_bytes)
        self._sums: dict[int, int] = {}
        """By place: of what was written there last."""
        self._writer, self._reader = (ThreadPoolExecutor(1, f"kv file {name}") for name in ("writer", "reader"))

    def write(self, pairs: Pairs) -> Future[list[bool]]:
        """Copy slots to their places; whether each was."""
        return self._writer.submit(self._write_all, pairs)

    def read(self, pairs: Pairs) -> Future[list[bool]]:
        """Copy places to their slots; whether each was."""
        return self._reader.submit(self._read_all, pairs)

    def close(self) -> None:
        for threads in (self._writer, self._reader):
            threads.shutdown(cancel_futures=True)
        os.close(self._file)

    def _write_all(self, pairs: Pairs) -> list[bool]:
        made: list[bool] = []
        for slot, place in pairs:
            made.append(self._copy(os.pwritev, slot, place * self._block_bytes))
            self._sums[place] = _sum(self._mover.memory(slot))
        return made

    def _read_all(self, pairs: Pairs) -> list[bool]:
        return [
            self._copy(os.preadv, slot, place * self._block_bytes)
            and _sum(self._mover.memory(slot)) == self._sums[place]
            for slot, place in pairs
        ]

    def _copy(self, copy: Callable[[int, list[memoryview], int], int], slot: int, at: int) -> bool:
        self._mover.wait([slot])
        pieces = self._mover.memory(slot)
        try:
            while pieces:
                count = copy(self._file, pieces, at)
                if count == 0:
                    return False
                at += count
                while pieces and count >= len(pieces[0]):
                    count -= len(pieces.pop(0))
                if pieces:
                    pieces[0] = pieces[0][count:]
        except OSError:
            return False
        return True


class OneFile:
    """The `BlockStore` of an engine on one device."""

    def __init__(self, file: BlockFile) -> None:
        self._file = file

    def write(self, pairs: Pairs) -> list[Future[list[bool]]]:
        return [self._file.write(pairs)]

    def read(self, pairs: Pairs) -> list[Future[list[bool]]]:
        return [self._file.read(pairs)]

    def close(self) -> None:
        self._file.close()


def _sum(pieces: list[memoryview]) -> int:
    """Of the words of a block, and of the bytes behind the last of them. A CRC would take longer than the copy."""
    total = 0
    for piece in pieces:
        words = len(piece) // 8 * 8
        total += int(np.frombuffer(piece[:words], np.uint64).sum()) + sum(piece[words:])
    return total


def _open(folder: Path, size: int) -> int:
    """A file of `size` bytes that only this process can see, its space taken."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_PREFIX}*"):  # of a process that was killed before it could take the name away
            with suppress(OSError):
                left.unlink()
        file = _unnamed(folder)
        try:
            _reserve(file, size)
        except OSError:
            os.close(file)
            raise
    except OSError as error:
        raise ConfigError(f"disk_memory: no file of {size / 2**30:.2f} GiB in {folder}: {error.strerror}") from error
    return file


def _unnamed(folder: Path) -> int:
    with suppress(AttributeError, OSError):
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
    file, name = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
    with suppress(FileNotFoundError):
        os.unlink(name)
    return file


def _reserve(file: int, size: int) -> None:
    try:
        os.posix_fallocate(file, 0, size)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(file, size)
