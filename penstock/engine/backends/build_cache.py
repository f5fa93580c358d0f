"""Where compiled kernels are kept between runs: a folder per kind in the user's cache.

What is made is named by the hash of everything it depends on, so nothing is ever rewritten. It is written to a
temporary name and renamed, under a file lock: processes that start together make it once, and none reads half a file.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_dir(kind: str) -> Path:
    """The folder of `kind`; it may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "penstock" / kind


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of this file; raises `OSError` where there are no file locks."""
    try:
        import fcntl
    except ImportError as error:
        raise OSError("there are no POSIX file locks") from error
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def cached(target: Path, make: Callable[[], bytes]) -> bytes:
    """The bytes of `target`; where there is no such file yet, what `make` returns, which is kept. A folder that cannot
    be written costs a later run the time to make it again, and raises nothing."""
    try:
        return target.read_bytes()
    except OSError:
        pass
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.parent / ".lock"):
            return target.read_bytes() if target.exists() else _keep(target, make())
    except OSError:
        return make()


def _keep(target: Path, made: bytes) -> bytes:
    handle, scratch = tempfile.mkstemp(dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(made)
        Path(scratch).replace(target)
    except OSError:
        Path(scratch).unlink(missing_ok=True)
    return made
