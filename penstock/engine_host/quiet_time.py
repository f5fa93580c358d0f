"""What an engine does when it has no work: save what outlives it, and prepare further steps.

Invariant: a message ends the preparation within milliseconds, and its failure is no reason to stop serving.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

QUIET_S = 0.2
"""Without work for so long, the engine may prepare further steps; a message ends that within milliseconds."""

log = logging.getLogger("penstock.engine")


class QuietTime:
    """The time since an engine's last work ended."""

    def __init__(self) -> None:
        self._improves = True
        """Whether the engine has something to prepare."""
        self._since: float | None = None

    def ended(self) -> None:
        """There is work."""
        self._since = None

    def begin_anew(self) -> None:
        """The engine was woken: everything is to be prepared again."""
        self._improves = True

    def use(self, engine: Any, patience: float, is_wanted: Callable[[], bool]) -> float:
        """Prepare further steps, when it has been quiet for a moment: not at once, or a client that sends one request
        after the other would wait. Returns how long to wait for messages, `patience` at most."""
        if not self._improves:
            return patience
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if (left := self._since + QUIET_S - now) > 0:
            return min(left, patience)
        return 0.0 if self._improve(engine, is_wanted) else patience

    def _improve(self, engine: Any, is_wanted: Callable[[], bool]) -> bool:
        """See `Engine.improve`."""
        improve = getattr(engine, "improve", None)
        if improve is None:
            return False
        try:
            self._improves = bool(improve(is_wanted))
        except Exception:
            log.exception("the engine could not prepare further steps; it goes on without them")
            self._improves = False
        return self._improves


def settle(engine: Any) -> bool:
    """Use a moment without work for saving; False: nothing is left to save. See `Engine.settle`."""
    saves = getattr(engine, "settle", None)
    return saves is not None and bool(saves())


def save(engine: Any, hurry: Callable[[], bool]) -> None:
    """The last thing before the process ends; see `Engine.save`."""
    saves = getattr(engine, "save", None)
    if saves is None:
        return
    try:
        saves(hurry=hurry)
    except Exception:
        log.exception("the engine could not save its KV blocks")
