"""What lies at which place of a file of blocks, in a second file: so that a restarted engine finds its blocks again.

A header names the format of the blocks and the epoch; every place has a record: the name of its block, the sum of its
bytes, when it was used, the epoch. A record is emptied before its place is overwritten, and written when the block is.

Invariant: a record that is read back is one that was written whole, at this place, for this format, in this epoch.
Records and header carry check sums, so a process may be killed, and a machine lose power, at any moment. A new epoch
makes all records void at once. Whether the block itself was written whole is for its reader to say, by the sum.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import secrets
import struct
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from penstock.engine.kv.block_hash import DIGEST_SIZE, NAMING
from penstock.engine.kv.own_file import open_own, overwrite

_MAGIC = b"penstock kv %d\n\0\0" % NAMING
_HEADER = struct.Struct("<16sQ32s")
"""Magic, epoch, digest of the format; the digest of these follows."""
_HEADER_CHECK = 16
_TABLE = 4096
"""Where the records begin."""
_RECORD = np.dtype([("name", "<u8", 2), ("sum", "<u8"), ("epoch", "<u8"), ("used", "<u8"), ("check", "<u8", 3)])
"""64 bytes, so that none lies across sectors."""
_ONE = struct.Struct("<16sQQQQ16x")
"""The same, of one record: for the threads that copy blocks, NumPy takes too long."""
_EMPTY = bytes(_RECORD.itemsize)
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_MIX = 0xFF51AFD7ED558CCD
_SHIFT = 29
_MASK = 2**64 - 1

Records = npt.NDArray[Any]
log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """A block that can be read."""

    name: bytes
    place: int


class BlockIndex:
    """The records of a file with `places` blocks. Two threads may change records of different places."""

    def __init__(self, file: Path, block_format: str, places: int) -> None:
        """Opens the file or makes it. `block_format`: everything that blocks here have in common, and other blocks may
        not; with another one, nothing that was kept is found."""
        self.problem = ""
        """Why nothing was found in a file that was there."""
        self.epoch = 0
        """Of the records."""
        self.anew = False
        """Whether nothing that lies in the file of blocks, if anything does, can be known."""
        self._digest = blake2b(block_format.encode(), digest_size=32).digest()
        self._fd = open_own(file)
        try:
            self.records: Records = np.zeros(places, _RECORD)
            self._memory = self.records.view(np.uint8).reshape(-1).data
            self._read()
        except BaseException:
            os.close(self._fd)
            raise
        self._clock = itertools.count(int(self.records["used"].max(initial=0)) + 1)

    def entries(self) -> list[Entry]:
        """What is here, the least recently used first. A name that is here twice: the newer one."""
        order = np.argsort(self.records["used"], kind="stable")
        found: dict[bytes, int] = {}
        names = np.ascontiguousarray(self.records["name"]).tobytes()
        for place in order[self.records["used"][order] > 0].tolist():
            name = names[place * DIGEST_SIZE : (place + 1) * DIGEST_SIZE]
            found.pop(name, None)
            found[name] = place
        return [Entry(name, place) for name, place in found.items()]

    def holds(self, names: bytes, places: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether each place holds the block of that name; the names end to end."""
        wanted = np.frombuffer(names, np.uint64).reshape(-1, 2)
        inside = places < len(self.records)
        there = self.records[np.where(inside, places, 0)]
        same: npt.NDArray[np.bool_] = inside & (there["used"] > 0) & (there["name"] == wanted).all(axis=1)
        return same

    def sum_of(self, place: int) -> int | None:
        """Of the block at a place; None: there is none."""
        _, total, _, used, _ = self._load(place)
        return total if used else None

    def put(self, place: int, name: bytes, total: int, epoch: int) -> None:
        """A block was written."""
        if epoch == self.epoch:
            self._save(place, name, total, epoch)

    def touch(self, place: int) -> None:
        """A block was read."""
        name, total, epoch, used, _ = self._load(place)
        if used:
            self._save(place, name, total, epoch)

    def clear(self, place: int) -> None:
        """A block is about to be overwritten, or is damaged."""
        if self._load(place)[3]:
            self.empty(place)

    def empty(self, place: int) -> None:
        """Leave nothing of a record, be it of an earlier epoch."""
        self._store(place, _EMPTY)

    def begin_epoch(self, epoch: int | None = None) -> None:
        """Forget all blocks, for good when this returns. `epoch`: the one to begin; nothing happens in the same."""
        if epoch == self.epoch:
            return
        self.epoch = new_epoch() if epoch is None else epoch
        self.records[:] = np.zeros((), _RECORD)
        header = _HEADER.pack(_MAGIC, self.epoch, self._digest)
        try:
            os.pwrite(self._fd, header + _check(header), 0)
            os.fsync(self._fd)
        except OSError as error:
            log.error("the index of KV blocks on disk cannot be written (%s); it is emptied", error.strerror)
            os.ftruncate(self._fd, 0)

    def reorder(self, places: Sequence[int]) -> None:
        """Remember in which order blocks were used, the least recently used first."""
        self.records["used"][np.asarray(places, np.int64)] = [next(self._clock) for _ in places]
        self.records["check"][:, 0] = _checks(self.records, np.arange(len(self.records), dtype=np.uint64))
        self.records[self.records["used"] == 0] = np.zeros((), _RECORD)
        os.pwrite(self._fd, self.records.tobytes(), _TABLE)

    def sync(self) -> None:
        """Wait until the records are on disk."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def _read(self) -> None:
        size = os.fstat(self._fd).st_size
        header = _read_header(self._fd)
        if header is None:
            self.problem = "its index is damaged" if size else ""
        else:
            magic, epoch, digest = header
            if magic != _MAGIC or digest != self._digest:
                self.problem = "it has blocks of another format"
            else:
                self.epoch = epoch
        if not self.epoch:
            self.anew = True
            os.ftruncate(self._fd, 0)
            self._reserve()
            self.begin_epoch()
            return
        data = os.pread(self._fd, self.records.nbytes, _TABLE)
        whole = len(data) // _RECORD.itemsize
        found = np.frombuffer(data[: whole * _RECORD.itemsize], _RECORD)
        valid = found["check"][:, 0] == _checks(found, np.arange(whole, dtype=np.uint64))
        valid &= (found["epoch"] == np.uint64(self.epoch)) & (found["used"] > 0)
        self.records[:whole][valid] = found[valid]
        if size > _TABLE + self.records.nbytes:  # it had more places
            os.ftruncate(self._fd, _TABLE + self.records.nbytes)
        self._reserve()

    def _reserve(self) -> None:
        """Take the space, so that a full disk is noticed now."""
        try:
            os.posix_fallocate(self._fd, 0, _TABLE + self.records.nbytes)
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(self._fd, _TABLE + self.records.nbytes)  # its size says how many places there are

    def _load(self, place: int) -> tuple[bytes, int, int, int, int]:
        """Name, sum, epoch, when it was used, check."""
        return cast("tuple[bytes, int, int, int, int]", _ONE.unpack_from(self._memory, place * _ONE.size))

    def _save(self, place: int, name: bytes, total: int, epoch: int) -> None:
        used = next(self._clock)
        self._store(place, _ONE.pack(name, total, epoch, used, _check_of(name, total, epoch, used, place)))

    def _store(self, place: int, record: bytes) -> None:
        begin = place * _ONE.size
        self._memory[begin : begin + _ONE.size] = record
        os.pwrite(self._fd, record, _TABLE + begin)


def erase_owned(index: int, blocks: int, tag: bytes) -> int:
    """Overwrite every block of an owner in a file of blocks that no engine uses, and its record, be it void; how many.
    Where the index does not say whose blocks are, as that of an earlier release does not, all go: nobody can use them.
    Both files are open. Raises `OSError`."""
    header = _read_header(index)
    data = os.pread(index, os.fstat(index).st_size - _TABLE, _TABLE) if os.fstat(index).st_size > _TABLE else b""
    places = len(data) // _RECORD.itemsize
    if header is None or header[0] != _MAGIC:
        for file in (blocks, index):
            os.ftruncate(file, 0)
            os.fsync(file)
        return sum(_is_used(data, at) for at in range(places))
    size = os.fstat(blocks).st_size // max(places, 1)
    owned = [at for at in range(places) if data.startswith(tag, at * _RECORD.itemsize) and _is_used(data, at)]
    for place in owned:
        os.pwrite(index, _EMPTY, _TABLE + place * _RECORD.itemsize)
        overwrite(blocks, place * size, size)
    os.fdatasync(blocks)
    os.fdatasync(index)
    return len(owned)


def _is_used(data: bytes, place: int) -> bool:
    return data[place * _RECORD.itemsize : (place + 1) * _RECORD.itemsize] != _EMPTY


def _read_header(index: int) -> tuple[bytes, int, bytes] | None:
    """Magic, epoch and digest of the format; None where they are not whole."""
    header = os.pread(index, _HEADER.size + _HEADER_CHECK, 0)
    fields, check = header[: _HEADER.size], header[_HEADER.size :]
    if len(fields) < _HEADER.size or check != _check(fields):
        return None
    return cast("tuple[bytes, int, bytes]", _HEADER.unpack(fields))


def new_epoch() -> int:
    return secrets.randbits(64) | 1


def _check(header: bytes) -> bytes:
    return blake2b(header, digest_size=_HEADER_CHECK).digest()


def _check_of(name: bytes, total: int, epoch: int, used: int, place: int) -> int:
    """Of one record at its place."""
    check = _FACTORS[0]
    fields = (int.from_bytes(name[:8], "little"), int.from_bytes(name[8:], "little"), total, epoch, used, place)
    for at, field in enumerate(fields):
        check = ((check ^ (field * _FACTORS[at % 4] & _MASK)) * _MIX) & _MASK
        check ^= check >> _SHIFT
    return check


def _checks(records: Records, places: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The same of many."""
    fields = (records["name"][:, 0], records["name"][:, 1], records["sum"], records["epoch"], records["used"], places)
    with np.errstate(over="ignore"):
        checks = np.full(len(records), _FACTORS[0], np.uint64)
        for at, field in enumerate(fields):
            checks = (checks ^ (field * np.uint64(_FACTORS[at % 4]))) * np.uint64(_MIX)
            checks ^= checks >> np.uint64(_SHIFT)
    return checks
