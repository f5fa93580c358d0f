"""The interpreter, set up for a process that holds thousands of streams.

A step of ten thousand streams makes tens of thousands of small objects that die by themselves a moment later. With the
usual thresholds they would set off garbage collections while they live, each of which looks at all there is: almost
half of a busy gateway's time. So what was made at start is left out for good, and a collection begins only when as many
objects have come to stay as a leak of cycles would need to matter.

Threads that serve the event loop (the HTTP server's, the store's) ask for the interpreter thousands of times a second,
for microseconds each. By default a busy loop lets them wait 5 ms every time, which is all the time a request may take.
"""

from __future__ import annotations

import gc
import sys

YOUNG = 100_000
"""Objects that may come to stay before the young ones are examined: some tens of megabytes at most."""
SWITCH_S = 0.0001
"""How long another thread waits for a busy one to make room."""


def settle_in() -> None:
    """Call once, when everything that stays has been loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)
    sys.setswitchinterval(SWITCH_S)
