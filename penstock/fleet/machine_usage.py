"""How much of a machine is in use: its GPUs, or without any its processors; averaged over about half a minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

SAMPLE_S = 2.0
AVERAGE_S = 30.0
STEP = 0.1
"""What is told is rounded to this, so that it changes seldom."""


class Usage:
    """Reads the counters of the system when it is asked, at most every `SAMPLE_S`."""

    def __init__(
        self, read: Callable[[], tuple[float, float]] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`read`: the time spent working and in all so far, of all processors."""
        self._read = read or _processors
        self._clock = clock
        self._sampled_at = clock()
        self._before = self._read()
        self._average = 0.0

    def busy(self) -> float:
        now = self._clock()
        elapsed = now - self._sampled_at
        if elapsed >= SAMPLE_S:
            gpus = _gpus()
            used = self._of_processors() if gpus is None else gpus
            self._average += (used - self._average) * (1.0 - math.exp(-elapsed / AVERAGE_S))
            self._sampled_at = now
        return round(round(self._average / STEP) * STEP, 3)

    def _of_processors(self) -> float:
        before, self._before = self._before, self._read()
        working, whole = (after - earlier for after, earlier in zip(self._before, before, strict=True))
        return min(max(working / whole, 0.0), 1.0) if whole > 0 else 0.0


def _processors() -> tuple[float, float]:
    try:
        ticks = [float(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0, 0.0
    idle = sum(ticks[3:5])
    return sum(ticks) - idle, sum(ticks)


def _gpus() -> float | None:
    """Of all GPUs together; None: there are none."""
    try:
        import pynvml

        count = pynvml.nvmlDeviceGetCount()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        rates = [pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in handles]
    except Exception:  # no driver, no package, or not initialised
        return None
    return sum(rates) / len(rates) if rates else None
