"""Ends a process whose engine has work but completes no step.

A dead engine is noticed and restarted; a stuck one would hold its clients forever. There are two alarms: a thread that
dumps every stack and exits with code 70, and, for native code that never releases the interpreter, the timer of
`faulthandler`, which does not need it.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

EXIT_STUCK = 70

log = logging.getLogger("penstock.engine")


def exit_stuck(stalled_s: float) -> None:
    """Dump the stack of every thread, and exit without waiting for any of them."""
    log.critical("no step finished for %.0f s although there is work: the engine is stuck and exits", stalled_s)
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    os._exit(EXIT_STUCK)


class Watchdog:
    """Call `busy` before a step and `idle` after one that made progress; `on_stuck` when `limit_s` pass in between."""

    def __init__(
        self,
        limit_s: float,
        *,
        on_stuck: Callable[[float], None] = exit_stuck,
        clock: Callable[[], float] = time.monotonic,
        last_resort: bool = True,
    ) -> None:
        self._limit_s = limit_s
        self._on_stuck = on_stuck
        self._clock = clock
        self._last_resort = last_resort
        self._busy_since: float | None = None
        self._armed_at: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._arm(self._clock())

    def busy(self) -> None:
        """A step begins. Without an `idle` in between, the time counts from the first."""
        now = self._clock()
        if self._busy_since is None:
            self._busy_since = now
        self._arm(now)

    def idle(self) -> None:
        """A step made progress, or there is nothing to do; to be called at least about once a second."""
        self._busy_since = None
        self._arm(self._clock())

    def pause(self) -> None:
        """Something legitimately slow begins; the next `busy` or `idle` ends it."""
        self._busy_since = None
        if self._armed_at is not None:
            faulthandler.cancel_dump_traceback_later()
            self._armed_at = None

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.pause()

    def _arm(self, now: float) -> None:
        # Arming starts a native thread, so not at every step: the alarm is then at most a second early.
        if self._last_resort and (self._armed_at is None or now - self._armed_at > 1.0):
            faulthandler.dump_traceback_later(2 * self._limit_s + 5.0, exit=True)
            self._armed_at = now

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self._limit_s / 4)):
            since = self._busy_since
            if since is not None and (stalled := self._clock() - since) >= self._limit_s:
                self._on_stuck(stalled)
                return
