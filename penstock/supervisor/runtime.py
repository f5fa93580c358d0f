"""The runtime folder: sockets and resolved configuration of one running server, private to its user.

Each server has its own folder with a lock file. The kernel releases the lock when the supervisor dies, however it dies,
so a folder whose lock is free is stale and the next server removes it. A process id would be less reliable, because ids
are reused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from types import TracebackType

from penstock.errors import ConfigError

_LOCK = "lock"
_LONGEST = 60
"""Maximum length of the base path; the system limits socket paths to about 100 bytes."""


class RuntimeFolder:
    """A fresh private folder, removed on exit."""

    def __init__(self, base: Path | None = None) -> None:
        base = base or _base()
        _make_private(base)
        sweep(base)
        self.path = Path(tempfile.mkdtemp(prefix="server-", dir=base))
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def endpoint(self, model: int, replica: int) -> str:
        return f"ipc://{self.path}/engine-{model}-{replica}"

    @property
    def coordinator(self) -> Path:
        """The socket of the coordinator of gateway workers."""
        return self.path / "coordinator"

    @property
    def control(self) -> Path:
        """The supervisor's control socket."""
        return self.path / "control"

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def __enter__(self) -> RuntimeFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def sweep(base: Path) -> list[Path]:
    """Removes the folders of servers that are gone and returns them."""
    swept = []
    for folder in base.glob("server-*"):
        with contextlib.suppress(OSError):
            # A folder without a lock file is being created right now, or was emptied by hand: leave it.
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                swept.append(folder)
            finally:
                os.close(lock)
    return swept


def _base() -> Path:
    configured = os.environ.get("XDG_RUNTIME_DIR")
    if configured and len(configured) <= _LONGEST and os.access(configured, os.W_OK):
        return Path(configured) / "penstock"
    temporary = tempfile.gettempdir()
    return Path(temporary if len(temporary) <= _LONGEST else "/tmp") / f"penstock-{os.getuid()}"


def _make_private(base: Path) -> None:
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = base.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigError(f"{base} is not a folder owned by this user; remove it or set XDG_RUNTIME_DIR")
        if stat.S_IMODE(found.st_mode) != 0o700:
            base.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"cannot create the runtime folder {base}: {error.strerror}; set XDG_RUNTIME_DIR") from error
