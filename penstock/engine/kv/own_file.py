"""Files of what tenants said that have a name: opened only where nobody but this user has a hand in them.

Invariant: a file that is opened here is a plain file of this user, without a second name, and closed to all others.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_ZEROS = bytes(2**20)


def open_own(file: Path) -> int:
    """The file of that name, to read and write; it is made when it is not there. Raises `OSError`."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        opened = os.open(file, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise PermissionError(errno.EPERM, f"{file} is a symbolic link; delete it") from error
        raise
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink > 1:
            raise PermissionError(errno.EPERM, f"{file} is not a file of this user alone; delete it")
        if found.st_mode & 0o077:
            os.fchmod(opened, 0o600)
    except BaseException:
        os.close(opened)
        raise
    return opened


def overwrite(file: int, begin: int, size: int) -> None:
    """Zeros in place of what was there. Raises `OSError`."""
    end = begin + size
    while begin < end:
        begin += os.pwrite(file, memoryview(_ZEROS)[: end - begin], begin)


def own_folder(folder: Path, parents: bool = False) -> Path:
    """A folder that is this user's alone; it is made when it is not there. Raises `OSError`."""
    folder.mkdir(mode=0o700, parents=parents, exist_ok=True)
    if not is_own_folder(folder):
        raise PermissionError(errno.EPERM, f"{folder} is a link or belongs to another user; delete it")
    if folder.lstat().st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def is_own_folder(folder: Path) -> bool:
    """Whether it is a folder, not a link to one, and this user's."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
