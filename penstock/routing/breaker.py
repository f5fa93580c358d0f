"""Circuit breaker: decides from recent results whether a replica gets requests.

A plain object with an injected clock. Closed: everything passes. It opens when, within `window_s`, at least `failures`
requests failed and they are at least `share` of those that ended, or when it is tripped. Open: nothing passes for
`open_s`, doubled each time in a row up to `most_open_s`. Then it is half open: one request at a time is a probe; a
token from it closes the breaker, a failure opens it again. A probe without a result stops counting after `open_s`, so
that a client disconnect cannot keep a replica out for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

BreakerState = Literal["closed", "open", "half_open"]
_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """When the breaker opens, and for how long."""

    failures: int = 3
    share: float = 0.5
    window_s: float = 30.0
    open_s: float = 2.0
    most_open_s: float = 60.0


class Breaker:
    """The circuit breaker of one replica."""

    def __init__(self, policy: BreakerPolicy, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self._ended: deque[tuple[float, bool]] = deque(maxlen=_REMEMBERED)
        """Times at which requests ended, and whether they failed."""
        self._open_s = policy.open_s
        self._opened_at: float | None = None
        self._probed_at: float | None = None
        self.trips = 0

    @property
    def state(self) -> BreakerState:
        if self._opened_at is None:
            return "closed"
        return "open" if self._clock() - self._opened_at < self._open_s else "half_open"

    @property
    def allows(self) -> bool:
        """Whether a request may be sent now."""
        state = self.state
        if state != "half_open":
            return state == "closed"
        return self._probed_at is None or self._clock() - self._probed_at >= self._policy.open_s

    @property
    def opens_in_s(self) -> float:
        """Seconds until a request may be sent again; 0 when one may now."""
        if self._opened_at is None:
            return 0.0
        return max(0.0, self._opened_at + self._open_s - self._clock())

    def began(self) -> None:
        """Reports that a request was sent; in the half-open state it is the probe."""
        if self.state == "half_open":
            self._probed_at = self._clock()

    def succeeded(self) -> None:
        """Reports that a request got a token."""
        state = self.state
        if state == "half_open":
            self._opened_at = self._probed_at = None
            self._open_s = self._policy.open_s
            self._ended.clear()
        elif state == "closed":
            self._ended.append((self._clock(), False))

    def failed(self) -> None:
        """Reports that a request failed through the replica's fault."""
        state = self.state
        if state == "half_open":
            self._open_s = min(self._open_s * 2, self._policy.most_open_s)
            self._open()
        elif state == "closed":
            now = self._clock()
            self._ended.append((now, True))
            while self._ended[0][0] < now - self._policy.window_s:
                self._ended.popleft()
            failures = sum(failed for _, failed in self._ended)
            if failures >= self._policy.failures and failures >= self._policy.share * len(self._ended):
                self._open()

    def trip(self) -> None:
        """Opens the breaker now, for a replica that is known to be stuck."""
        if self.state != "open":
            self._open()

    def _open(self) -> None:
        self.trips += 1
        self._opened_at, self._probed_at = self._clock(), None
        self._ended.clear()
