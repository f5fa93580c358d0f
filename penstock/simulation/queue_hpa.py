"""The rival of our autoscaler: a plain Kubernetes HorizontalPodAutoscaler on waiting requests per replica.

Its rules are the documented defaults of `autoscaling/v2`: desired = ready x metric / target, nothing within a tolerance
of 10%, upward at most double or four replicas per 15 s, downward the highest recommendation of the last 300 s. It knows
neither cold starts nor a forecast, and it sees an empty queue as no load at all.
"""

from __future__ import annotations

import math
from collections import deque

from penstock.planning.autoscaling import Decision, FleetLoad, Needs

TOLERANCE = 0.1
PERIOD_S = 15.0
STABILISATION_S = 300.0
SURE_STEP = 4


class QueueHPA:
    """Replicas from the queue alone."""

    def __init__(self, minimum: int, maximum: int, waiting_per_replica: float = 2.0) -> None:
        self.minimum = max(minimum, 1)
        self.maximum = maximum
        self.target = waiting_per_replica
        self._count: int | None = None
        self._decided = -math.inf
        self._window: deque[tuple[float, int]] = deque()

    def decide(self, load: FleetLoad) -> Decision:
        if self._count is None:
            self._count = load.present
        before = self._count
        if load.now - self._decided >= PERIOD_S:
            self._decided = load.now
            self._count = min(max(self._wanted(load, before), self.minimum), self.maximum)
        return Decision(load.now, self._count, before, "steady", f"{load.queued} requests wait", Needs())

    def _wanted(self, load: FleetLoad, before: int) -> int:
        ready = max(load.ready, 1)
        ratio = load.queued / ready / self.target
        # Replicas that are not ready count for nothing, so a start that was asked for is not asked for again.
        wanted = before if abs(ratio - 1.0) <= TOLERANCE else math.ceil(ready * ratio)
        if wanted > before:
            wanted = min(wanted, before + max(before, SURE_STEP))
        while self._window and self._window[0][0] <= load.now - STABILISATION_S:
            self._window.popleft()
        self._window.append((load.now, wanted))
        if wanted < before:
            wanted = min(before, max(recommended for _, recommended in self._window))
        return wanted

    def spot(self, count: int) -> int:
        """It knows no spot capacity."""
        return 0
