"""Keys of servers, from an environment variable or a file.

Invariant: a key is never part of a log line, an error or a `repr`. A file is read again when it has changed (a mounted
secret that is rotated), at most once in `LOOK_S`; while it is missing or empty, its last key stays in use.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from penstock.errors import ConfigError

LOOK_S = 1.0
LARGEST = 64 * 1024

log = logging.getLogger("penstock.backends")


class Key:
    """The key of one server; empty: it needs none."""

    __slots__ = ("_file", "_looked_at", "_name", "_seen", "_value", "_where")

    def __init__(self, name: str = "", file: str = "", where: str = "") -> None:
        """`name`: of the environment variable. `where`: what the key is for, as errors say it."""
        self._name, self._where = name, where
        self._file = Path(file) if file else None
        self._value = ""
        self._seen: tuple[int, int, int] | None = None
        self._looked_at = float("-inf")

    def __repr__(self) -> str:
        return f"Key({self._name or self._file or 'none'})"

    def check(self) -> None:
        """Raises `ConfigError` if there should be a key and there is none."""
        if self._file is not None:
            self._look()
            if not self._value:
                raise ConfigError(f"the key file {self._file} (key_file of {self._where}) is missing or empty")
        elif self._name and not os.environ.get(self._name):
            raise ConfigError(f"the environment variable {self._name} (key_env of {self._where}) is not set")
        if self._file is None and not (self.value().isascii() and self.value().isprintable()):
            raise ConfigError(f"the key in {self._name} (key_env of {self._where}) has characters that no key has")

    def value(self) -> str:
        if self._file is None:
            return os.environ.get(self._name, "").strip() if self._name else ""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._look()
        return self._value

    def _look(self) -> None:
        """Reads the file if it has changed. It is small and on this machine, so that this is one `stat` as a rule."""
        assert self._file is not None
        try:
            found = self._file.stat()
            seen = (found.st_mtime_ns, found.st_size, found.st_ino)
            if seen == self._seen:
                return
            with self._file.open("rb") as opened:
                value = opened.read(LARGEST).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            if self._value:
                log.warning("key file cannot be read", extra={"file": str(self._file), "why": type(error).__name__})
            return
        if value:
            self._value, self._seen = value, seen


def authorization(key_env: str, url: str) -> dict[str, str]:
    """The authorization header for `url`; empty if no key is needed."""
    key = Key(key_env, where=url)
    key.check()
    return {"authorization": f"Bearer {key.value()}"} if key_env else {}
