"""Garbage collection and thread switching, tuned for a process that holds thousands of streams.

A step of ten thousand streams allocates tens of thousands of small objects that are freed a moment later by reference
counting. With the default thresholds they would trigger garbage collections while they live, each of which scans the
whole heap: almost half of a busy gateway's time. So the objects that exist at the start are frozen, and a collection
begins only after as many allocations as a leak of reference cycles would need to matter.

The threads that serve the event loop (the database's, for example) need the interpreter lock thousands of times a
second, for microseconds each. By default a busy loop lets them wait 5 ms every time, as long as a request may take.
"""

from __future__ import annotations

import gc
import sys

YOUNG = 100_000
"""Allocations before the youngest generation is collected: some tens of megabytes at most."""
SWITCH_S = 0.0001
"""How long another thread waits for the interpreter lock."""


def tune() -> None:
    """Call once, after everything that lives as long as the process has been loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)
    sys.setswitchinterval(SWITCH_S)
