"""Folders of blocks that outlive an engine: which of them this engine may use, and which are deleted.

    disk_path/kv-cache/lock                           held while slots are taken or deleted (`flock`)
                      /MODEL-DIGEST/identity          what the blocks were computed with, to read
                                   /0/rank0.lock      held while an engine uses slot 0
                                     /rank0.blocks    and its index; the same for states

The digest is that of everything that blocks depend on, so blocks of other weights or settings are in another folder.
Each replica on a machine has a slot, and each of its ranks files of its own there.

Invariant: files belong to the process that holds their lock; nothing is deleted without it. Everything here can be read
by its owner only, and what is not this user's is neither used nor deleted.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from penstock.engine.kv.block_file import KeptFile
from penstock.engine.kv.block_hash import owner_tag
from penstock.engine.kv.block_index import erase_owned
from penstock.engine.kv.own_file import is_own_folder, open_own, own_folder

MOST_SLOTS = 64
"""Engines that may use a folder at the same time."""
STALE_S = 7 * 86400.0
"""What no engine has used for so long is deleted."""
LOCK_S = 10.0
"""How long a rank may wait for the one before it to exit."""
_POLL_S = 0.05
_ROOT = "kv-cache"
_LOCK = "lock"
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
        return "\n".join((*self.lines, self.model_line)) + "\n"

    @property
    def model_line(self) -> str:
        """Names of folders are not enough to tell models apart."""
        return f"model: {self.model}"

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
    root = own_folder(disk_path / _ROOT, parents=True)
    deadline = time.monotonic() + LOCK_S
    while True:
        with suppress(FileNotFoundError), _alone(root):  # somebody may delete it by hand
            folder = own_folder(root / identity.folder)
            _describe(folder, identity)
            for each in _by_use(folder) if number is None else (number,):
                slot = own_folder(folder / str(each))
                lock = _try_lock(slot / f"rank{rank}.lock")
                if lock is not None:
                    os.utime(lock)
                    return KeptSlot(slot, each, rank, lock)
        if time.monotonic() > deadline:
            raise OSError(errno.EBUSY, f"all {MOST_SLOTS} slots are in use" if number is None else "its slot is in use")
        time.sleep(_POLL_S)


def sweep(disk_path: Path, identity: Identity, *, for_space: bool = False) -> None:
    """Delete what no engine uses and none will: blocks of the same model with other weights, and of any model what was
    not used for a week. `for_space`: also all others of this model, because space is needed."""
    root = disk_path / _ROOT
    with suppress(OSError):
        if not is_own_folder(root):
            return
        with _alone(root):
            for folder in sorted(root.iterdir()):
                with suppress(OSError):
                    if is_own_folder(folder):
                        _sweep_folder(folder, identity, for_space)


@dataclass(slots=True)
class Erased:
    """What was erased in files that no engine uses."""

    blocks: int = 0
    """Also states of recurrent layers."""
    busy: list[Path] = field(default_factory=list)
    """Slots that engines use: those must be told to erase."""


def erase(disk_path: Path, *owners: str) -> Erased:
    """Overwrite what the requests of these owners have left in files that no engine uses. Raises `OSError`."""
    found, tags, root = Erased(), [owner_tag(owner) for owner in owners], disk_path / _ROOT
    if not root.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"it has no folder {_ROOT}; is it the disk_path of a model?")
    own_folder(root)
    for slot in sorted(slot for slot in root.glob("*/*") if slot.name.isdecimal()):
        with ExitStack() as held:
            with _alone(root):  # not for longer: engines that start meanwhile take other slots
                if not slot.exists() or not is_own_folder(slot):
                    continue
                os.close(open_own(slot / "rank0.lock"))  # so that there is one to hold
                free = held.enter_context(_held(slot))
            if not free:
                found.busy.append(slot)
                continue
            for file in sorted(slot.glob("rank*.index")):
                index, blocks = open_own(file), open_own(file.with_suffix(""))
                try:
                    found.blocks += sum(erase_owned(index, blocks, tag) for tag in tags)
                finally:
                    os.close(index)
                    os.close(blocks)
    return found


def _sweep_folder(folder: Path, identity: Identity, for_space: bool) -> None:
    file = folder / _IDENTITY
    if file.is_symlink() or not file.is_file():
        return
    lines = tuple(file.read_text(errors="replace").splitlines())
    why = ""
    if identity.model_line in lines:
        if folder.name != identity.folder:
            changed = [line.partition(":")[0] for line in identity.lines if line not in lines] or ["their format"]
            model, differences = identity.model, ", ".join(changed)
            log.info("%s: blocks kept in %s are not used: they differ in %s", model, folder, differences)
            if lines[:1] != identity.lines[:1]:
                why = f"they differ in {changed[0]}"
        if for_space:
            why = why or "space is needed"
    left = 0
    for slot in [each for each in folder.iterdir() if each.name.isdecimal() and is_own_folder(each)]:
        unused_s = time.time() - _last_use(slot)
        reason = why or (f"not used for {unused_s / 86400:.0f} days" if unused_s > STALE_S else "")
        if not reason or not _delete(slot):
            left += 1
        else:
            log.warning("deleted kept blocks of %s in %s: %s", folder.name.rpartition("-")[0], slot, reason)
    if not left and folder.name != identity.folder:
        file.unlink()
        folder.rmdir()


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """While no other engine takes or deletes slots. Raises `OSError`."""
    deadline = time.monotonic() + LOCK_S
    while (lock := _try_lock(root / _LOCK)) is None:
        if time.monotonic() > deadline:
            raise OSError(errno.EBUSY, f"another process holds {root / _LOCK}")
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        os.close(lock)


def _describe(folder: Path, identity: Identity) -> None:
    """Write down what a folder is for: all of it or nothing, for others go by it."""
    file = folder / _IDENTITY
    with suppress(OSError, ValueError):
        if not file.is_symlink() and file.read_text() == identity.text:
            return
    new = folder / f"{_IDENTITY}.new"
    new.unlink(missing_ok=True)
    with os.fdopen(open_own(new), "w") as handle:
        handle.write(identity.text)
    new.replace(file)


def _by_use(folder: Path) -> list[int]:
    """All slots, those that were used first, the last one before the others."""
    used = {number: _last_use(slot) for number in range(MOST_SLOTS) if (slot := folder / str(number)).is_dir()}
    return sorted(range(MOST_SLOTS), key=lambda number: (-used.get(number, 0.0), number))


def _last_use(slot: Path) -> float:
    """When something in a slot was written last."""
    return max((file.stat().st_mtime for file in slot.glob("rank*")), default=slot.stat().st_mtime)


def _delete(slot: Path) -> bool:
    """Delete a slot that nobody uses; whether it was."""
    with _held(slot) as free:
        if free:
            shutil.rmtree(slot, ignore_errors=True)
        return free and not slot.exists()


@contextmanager
def _held(slot: Path) -> Iterator[bool]:
    """While no engine may use a slot; False: one does."""
    held: list[int] = []
    try:
        for file in slot.glob("rank*.lock"):
            lock = _try_lock(file)
            if lock is None:
                break
            held.append(lock)
        else:
            yield True
            return
        yield False
    finally:
        for lock in held:
            os.close(lock)


def _try_lock(file: Path) -> int | None:
    """The locked file, or None where another process has it."""
    opened = open_own(file)
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
