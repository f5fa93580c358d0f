"""Reading adapters in the background, so that a step never waits for a file or a network.

The engine's thread asks with `start` and takes results with `finished`; loader threads only read, check and pack.
Bounded by the caller: an adapter is asked for once until its result is taken.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.engine.adapters.peft import LoadedAdapter
from penstock.errors import PenstockError

_THREADS = 2
"""A slow download must not delay an adapter that is on disk."""

_LONGEST = 2000
"""Characters of a reason: it is sent to clients, and may quote names in a file."""

Key = TypeVar("Key")
Read = Callable[[str, str], LoadedAdapter]
"""(name, source) to the adapter; raises `PenstockError` with a sentence for the caller."""


@dataclass(frozen=True, slots=True)
class Loaded(Generic[Key]):
    """The result of one load."""

    key: Key
    adapter: LoadedAdapter | None
    error: str
    seconds: float


class Loader(Generic[Key]):
    """Up to `_THREADS` daemon threads around `read`; there are none while there is nothing to read."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._wanted: deque[tuple[Key, str, str]] = deque()
        self._done: deque[Loaded[Key]] = deque()
        self._arrived = threading.Event()
        self._working = 0

    def start(self, key: Key, name: str, source: str) -> None:
        with self._lock:
            self._wanted.append((key, name, source))
            if self._working == _THREADS:
                return
            self._working += 1
        threading.Thread(target=self._work, name="adapter loader", daemon=True).start()

    def finished(self) -> list[Loaded[Key]]:
        """Results since the last call; never waits."""
        if not self._arrived.is_set():
            return []
        with self._lock:
            self._arrived.clear()
            results = list(self._done)
            self._done.clear()
        return results

    def wait(self, seconds: float) -> None:
        """Until there is a result, or `seconds` have passed."""
        self._arrived.wait(seconds)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._working -= 1
                    return
                key, name, source = self._wanted.popleft()
            result = self._load(key, name, source)
            with self._lock:
                self._done.append(result)
                self._arrived.set()

    def _load(self, key: Key, name: str, source: str) -> Loaded[Key]:
        began = time.monotonic()
        adapter, error = None, ""
        try:
            adapter = self._read(name, source)
        except PenstockError as problem:
            error = str(problem)[:_LONGEST]
        except Exception as problem:  # a bad file fails its adapter, not the thread
            error = f"{type(problem).__name__}: {problem}"[:_LONGEST]
        return Loaded(key, adapter, error, time.monotonic() - began)
