"""A worker rank's part in putting its engine to sleep and waking it; see `offload` for rank 0's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.engine.backends.backend import Backend
from penstock.engine.sleep.memory import OffloadedMemory, offload_memory
from penstock.errors import PenstockError

SLEEP, WAKE, RESUME = "sleep", "wake", "resume"
"""What rank 0 calls: free the device's memory, bring it back, make captures again. All may be undone by `SLEEP`."""


class RankSleep:
    """Moves the device memory of everything that `root`, and whoever handles its calls, holds."""

    def __init__(self, root: object, backend: Backend, handlers: Mapping[str, Callable[..., Any]]) -> None:
        self._root = root
        self._backend = backend
        self._others = handlers
        self._offloaded: OffloadedMemory | None = None
        """While it sleeps, and until all ranks are awake."""

    @property
    def handlers(self) -> dict[str, Callable[[], None]]:
        return {SLEEP: self.sleep, WAKE: self.wake, RESUME: self.resume}

    def sleep(self) -> None:
        if self._offloaded is None:
            owners = [getattr(handler, "__self__", None) for handler in self._others.values()]
            self._offloaded = offload_memory([self._root, *owners], self._backend)
        else:
            self._offloaded.empty()  # it was about to wake, and another rank has no room

    def wake(self) -> None:
        self._attempt(self._asleep.restore)

    def resume(self) -> None:
        self._attempt(self._asleep.capture)
        self._asleep.discard()
        self._offloaded = None

    @property
    def _asleep(self) -> OffloadedMemory:
        assert self._offloaded is not None, "this rank is awake"
        return self._offloaded

    def _attempt(self, action: Callable[[], None]) -> None:
        """Without room it is refused, and may be tried again; any other failure ends the rank."""
        try:
            action()
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise PenstockError(f"there is no room to wake: {error}") from error
