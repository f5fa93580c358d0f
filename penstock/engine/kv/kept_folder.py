"""Folders of blocks that outlive an engine: which of them this engine may use, and which are deleted.

    disk_path/kv-cache/MODEL-DIGEST/identity          what the blocks were computed with, to read
                                   /0/rank0.lock      held while an engine uses slot 0 (`flock`)
                                     /rank0.blocks    and its index; the same for states

The digest is that of everything that blocks depend on, so blocks of other weights or settings are in another folder.
Each replica on a machine has a slot, and each of its ranks files of its own there.

Invariant: files belong to the process that holds their lock; nothing is deleted without it. Everything here can be read
by its owner only.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from penstock.engine.kv.block_file import KeptFile

MOST_SLOTS = 64
"""Engines that may use a folder at the same time."""
STALE_S = 7 * 86400.0
"""What no engine has used for so long is deleted."""
LOCK_S = 10.0
"""How long a rank may wait for the one before it to exit."""
_POLL_S = 0.05
_ROOT = "kv-cache"
_IDENTITY = "identity"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """What blocks were computed with: equal texts, and they are interchangeable."""

    model: str
    """What clients call it."""
    lines: tuple[str, ...]
    """`NAME: VALUE`, the first of them about the weights."""

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"

    @property
    def folder(self) -> str:
        digest = blake2b(self.text.encode(), digest_size=8).hexdigest()
        return f"{re.sub('[^A-Za-z0-9._]+', '-', self.model)[:64].strip('.-') or 'model'}-{digest}"


class KeptSlot:
    """One rank's files of one slot, locked until `close`."""

    def __init__(self, folder: Path, number: int, rank: int, lock: int) -> None:
        self.number = number
        self._folder = folder
        self._rank = rank
        self._lock = lock

    def file(self, kind: str, identity: Identity, layout: str) -> KeptFile:
        """`layout`: of this rank's part of a block."""
        return KeptFile(self._folder / f"rank{self._rank}.{kind}", f"{identity.text}rank {self._rank}: {layout}\n")

    def close(self) -> None:
        with suppress(OSError):
            os.utime(self._lock)
        os.close(self._lock)


def claim(disk_path: Path, identity: Identity, rank: int = 0, number: int | None = None) -> KeptSlot:
    """Lock a slot: of those that are free the one used last, or `number`, for which it waits a while. Raises
    `OSError`."""
    root = _private(disk_path / _ROOT, parents=True)
    deadline = time.monotonic() + LOCK_S
    while True:
        with suppress(FileNotFoundError):  # another engine has just deleted it
            folder = _private(root / identity.folder)
            with open(folder / _IDENTITY, "w", opener=_owner_only) as file:
                file.write(identity.text)
            for each in _by_use(folder) if number is None else (number,):
                slot = _private(folder / str(each))
                lock = _try_lock(slot / f"rank{rank}.lock")
                if lock is not None:
                    os.utime(lock)
                    return KeptSlot(slot, each, rank, lock)
        if time.monotonic() > deadline:
            raise OSError(errno.EBUSY, f"all {MOST_SLOTS} slots are in use" if number is None else "its slot is in use")
        time.sleep(_POLL_S)


def sweep(disk_path: Path, identity: Identity, *, all_of_model: bool = False) -> None:
    """Delete what no engine uses and none will: blocks of the same model with other weights, and of any model what was
    not used for a week. `all_of_model`: also those of this model with other settings, because space is needed."""
    with suppress(OSError):
        for folder in sorted((disk_path / _ROOT).iterdir()):
            with suppress(OSError):
                _sweep_folder(folder, identity, all_of_model)


def _sweep_folder(folder: Path, identity: Identity, all_of_model: bool) -> None:
    file = folder / _IDENTITY
    if folder.is_symlink() or not file.is_file():
        return
    lines = tuple(file.read_text(errors="replace").splitlines())
    same_model = folder.name.rpartition("-")[0] == identity.folder.rpartition("-")[0]
    why = ""
    if same_model and folder.name != identity.folder:
        changed = [name for line in identity.lines if line not in lines and (name := line.partition(":")[0])]
        log.info("%s: blocks kept in %s are not used: they differ in %s", identity.model, folder, ", ".join(changed))
        if all_of_model or lines[:1] != identity.lines[:1]:
            why = f"they differ in {changed[0] if changed else 'their format'}"
    left = 0
    for slot in [each for each in folder.iterdir() if each.is_dir() and not each.is_symlink()]:
        unused_s = time.time() - _last_use(slot)
        reason = why or (f"not used for {unused_s / 86400:.0f} days" if unused_s > STALE_S else "")
        if not reason or not _delete(slot):
            left += 1
        else:
            log.warning("deleted kept blocks of %s in %s: %s", folder.name.rpartition("-")[0], slot, reason)
    if not left and folder.name != identity.folder:
        shutil.rmtree(folder, ignore_errors=True)


def _by_use(folder: Path) -> list[int]:
    """All slots, those that were used first, the last one before the others."""
    used = {number: _last_use(slot) for number in range(MOST_SLOTS) if (slot := folder / str(number)).is_dir()}
    return sorted(range(MOST_SLOTS), key=lambda number: (-used.get(number, 0.0), number))


def _last_use(slot: Path) -> float:
    """When something in a slot was written last."""
    return max((file.stat().st_mtime for file in slot.glob("rank*")), default=slot.stat().st_mtime)


def _delete(slot: Path) -> bool:
    """Delete a slot that nobody uses; whether it was."""
    held: list[int] = []
    try:
        for file in slot.glob("rank*.lock"):
            lock = _try_lock(file)
            if lock is None:
                return False
            held.append(lock)
        shutil.rmtree(slot, ignore_errors=True)
        return True
    finally:
        for lock in held:
            os.close(lock)


def _try_lock(file: Path) -> int | None:
    """The locked file, or None where another process has it."""
    opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(opened), os.stat(file)):
            return opened
    except BlockingIOError:
        pass
    except FileNotFoundError:  # it was deleted between the two
        pass
    except BaseException:
        os.close(opened)
        raise
    os.close(opened)
    return None


def _private(folder: Path, parents: bool = False) -> Path:
    """A folder that is this user's alone."""
    folder.mkdir(mode=0o700, parents=parents, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.geteuid() or folder.is_symlink():
        raise PermissionError(errno.EPERM, f"{folder} belongs to another user")
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
