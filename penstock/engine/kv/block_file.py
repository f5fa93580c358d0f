"""KV blocks in a file: one rank's part of each, at a place of its own, read and written by threads.

A file holds what tenants said, so nobody else can open it: it has no name (on filesystems that cannot do that, it
loses its name at once), and is gone when the process is, however that ended. Only a file that is to outlive its process
has a name, in a folder of its own (`kept_folder`), and an index beside it (`block_index`).

Invariant: what is read is what was written. The sum of every block is kept; a block that comes back with another one,
from a damaged or truncated file, counts as not read.

Durability of a file that is kept: a record goes to the index behind its block, and neither waits for the disk.
`SYNC_S` later, and before the file is closed, both are synced, the blocks first. So a process may
be killed without loss, and power that fails costs what was written since: such a block is missing in the index, or its
sum is wrong. What is erased has been synced when that is said.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.engine.kv.block_index import BlockIndex, Entry
from penstock.engine.kv.mover import BlockMover
from penstock.engine.kv.own_file import open_own, overwrite
from penstock.errors import ConfigError

log = logging.getLogger(__name__)
_PREFIX = "penstock-kv-"
_PAGE = 4096
_WEIGHT = np.uint64(0x9E3779B97F4A7C15)
SYNC_S = 5.0
"""How long a block that was written may be lost with the machine's power."""
Pairs = list[tuple[int, int]]
"""Slots in host memory and places in the file."""


@dataclass(frozen=True, slots=True)
class KeptFile:
    """Where blocks are to be found by the next process."""

    file: Path
    block_format: str
    """Of the blocks; see `BlockIndex`."""

    @property
    def index(self) -> Path:
        return self.file.with_name(f"{self.file.name}.index")


class BlockFile:
    """`places` blocks on disk. One thread writes, another reads, each in the order it was told."""

    def __init__(self, folder: Path, places: int, mover: BlockMover, kept: KeptFile | None = None) -> None:
        """`mover`: owns the slots of host memory that blocks come from and go to. `kept`: for a file with a name, which
        may be there already; without, the file is in `folder`."""
        self._mover = mover
        self._kept = None if kept is None else kept.index
        self._block_bytes = sum(map(len, mover.memory(0)))
        size = places * self._block_bytes
        is_new = kept is None or not kept.file.exists()
        self._file = _open(folder, size) if kept is None else _open_kept(kept.file, size)
        self.index: BlockIndex | None = None
        if kept is not None:
            try:
                self.index = BlockIndex(kept.index, kept.block_format, places)
                if self.index.anew and not is_new:  # nobody would find what lies here, not even to erase it
                    os.ftruncate(self._file, 0)
                    if size:
                        _reserve(self._file, size)
            except OSError:
                if self.index is not None:
                    self.index.close()
                os.close(self._file)
                raise
        self._sums: dict[int, int] = {}
        """By place: of what was written there last. Those of a file with an index are there."""
        self._complained = False
        self._next_sync: threading.Timer | None = None
        self._writer, self._reader = (ThreadPoolExecutor(1, f"kv file {name}") for name in ("writer", "reader"))

    def write(self, pairs: Pairs, names: Sequence[bytes] = ()) -> Future[list[bool]]:
        """Copy slots to their places; whether each was. `names`: of the blocks, for a file that is kept."""
        epoch = 0 if self.index is None else self.index.epoch
        return self._writer.submit(self._write_all, pairs, names, epoch)

    def read(self, pairs: Pairs) -> Future[list[bool]]:
        """Copy places to their slots; whether each was."""
        return self._reader.submit(self._read_all, pairs)

    def erase(self, places: Sequence[int]) -> Future[list[bool]]:
        """Overwrite what lies at these places, and their records; whether that is on disk."""
        return self._writer.submit(self._erase_all, places)

    def confirm(self, epoch: int, names: bytes, places: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which blocks of rank 0 are here too, of its epoch; what is not is void."""
        assert self.index is not None
        self.forget(epoch)
        return self.index.holds(names, places)

    def forget(self, epoch: int | None = None) -> None:
        """Nothing that was written so far, or is being written, is found again, by this process or the next. `epoch`:
        the one that begins; nothing happens if it has."""
        if self.index is not None:
            try:
                self.index.begin_epoch(epoch)
            except OSError:
                log.exception("KV blocks could not be made void; delete %s before the next start", self._kept)

    def close(self) -> None:
        for threads in (self._writer, self._reader):
            threads.shutdown(cancel_futures=True)
        if self._next_sync is not None:
            self._next_sync.cancel()
        if self.index is not None:
            self._sync()
        os.close(self._file)
        if self.index is not None:
            self.index.close()

    def _write_all(self, pairs: Pairs, names: Sequence[bytes], epoch: int) -> list[bool]:
        if self.index is not None:
            named = zip(pairs, names, strict=True)
            kept = [self._keep(self.index, slot, place, name, epoch) for (slot, place), name in named]
            if self._next_sync is None:
                self._next_sync = threading.Timer(SYNC_S, self._sync_now)
                self._next_sync.daemon = True
                self._next_sync.start()
            return kept
        made: list[bool] = []
        for slot, place in pairs:
            made.append(self._copy(os.pwritev, slot, place * self._block_bytes))
            self._sums[place] = _sum(self._mover.memory(slot))
        return made

    def _keep(self, index: BlockIndex, slot: int, place: int, name: bytes, epoch: int) -> bool:
        """Write a block that the next process may find."""
        try:
            index.clear(place)
            if not self._copy(os.pwritev, slot, place * self._block_bytes):
                return False
            index.put(place, name, _sum(self._mover.memory(slot)), epoch)
        except OSError as error:
            return self._failed(error)
        return True

    def _sync_now(self) -> None:
        with suppress(RuntimeError):  # it was closed meanwhile
            self._writer.submit(self._sync)

    def _sync(self) -> bool:
        """Wait until everything that was written is on disk."""
        self._next_sync = None
        try:
            os.fdatasync(self._file)
            if self.index is not None:
                self.index.sync()
        except OSError as error:
            return self._failed(error)
        return True

    def _erase_all(self, places: Sequence[int]) -> list[bool]:
        made = [self._erase(place) for place in places]
        return made if self._sync() else [False] * len(made)

    def _erase(self, place: int) -> bool:
        self._sums.pop(place, None)
        try:
            if self.index is not None:
                self.index.empty(place)
            overwrite(self._file, place * self._block_bytes, self._block_bytes)
        except OSError as error:
            return self._failed(error)
        return True

    def _read_all(self, pairs: Pairs) -> list[bool]:
        return [self._read(slot, place) for slot, place in pairs]

    def _read(self, slot: int, place: int) -> bool:
        """Copy a block into its slot, if it is whole."""
        total = self._sums.get(place) if self.index is None else self.index.sum_of(place)
        made = self._copy(os.preadv, slot, place * self._block_bytes) and _sum(self._mover.memory(slot)) == total
        if self.index is not None:
            with suppress(OSError):
                if made:
                    self.index.touch(place)
                else:
                    self.index.clear(place)
        return made

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
        except OSError as error:
            return self._failed(error)
        return True

    def _failed(self, error: OSError) -> bool:
        """Say once what is wrong with the disk; further failures are counted."""
        if not self._complained:
            self._complained = True
            log.error("a KV block on disk could not be written or read: %s; it is computed instead", error.strerror)
        return False


class OneFile:
    """The `BlockStore` of an engine on one device."""

    def __init__(self, file: BlockFile) -> None:
        self._file = file

    def write(self, pairs: Pairs, names: Sequence[bytes] = ()) -> list[Future[list[bool]]]:
        return [self._file.write(pairs, names)]

    def read(self, pairs: Pairs) -> list[Future[list[bool]]]:
        return [self._file.read(pairs)]

    def erase(self, places: Sequence[int]) -> list[Future[list[bool]]]:
        return [self._file.erase(places)]

    def found(self) -> list[Entry]:
        return [] if self._file.index is None else self._file.index.entries()

    def forget(self) -> None:
        self._file.forget()

    def reorder(self, places: Sequence[int]) -> None:
        if self._file.index is not None:
            self._file.index.reorder(places)

    def close(self) -> None:
        self._file.close()


def _sum(pieces: list[memoryview]) -> int:
    """Of the words of a block, those of every page weighted by its place, and of the bytes behind the last of them. A
    CRC would take longer than the copy."""
    total = 0
    with np.errstate(over="ignore"):
        for piece in pieces:
            pages = len(piece) // _PAGE
            words = np.frombuffer(piece[: pages * _PAGE], np.uint64).reshape(pages, _PAGE // 8).sum(axis=1)
            weights = np.arange(1, 2 * pages, 2, dtype=np.uint64) * _WEIGHT
            rest = piece[pages * _PAGE :]
            whole = len(rest) // 8 * 8
            last = int(np.frombuffer(rest[:whole], np.uint64).sum()) + sum(rest[whole:])
            total = (total * 31 + int((words * weights).sum()) + last) % 2**64
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


def _open_kept(file: Path, size: int) -> int:
    """The file of that name with `size` bytes, its space taken; what is in it stays. Raises `OSError`."""
    opened = open_own(file)
    before = os.fstat(opened).st_size
    try:
        if before > size:
            os.ftruncate(opened, size)
        if size:
            _reserve(opened, size)
    except OSError:
        with suppress(OSError):
            os.ftruncate(opened, min(before, size))  # what was taken before the disk was full
        os.close(opened)
        raise
    return opened


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
