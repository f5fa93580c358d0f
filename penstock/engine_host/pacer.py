"""How often tokens are delivered when many requests run.

Delivering a token to a client costs about a tenth of a millisecond of CPU in all: the engine's message, the gateway,
two sockets. Where the engine computes on the same cores, it loses that time. So beyond a few requests, tokens are held
and delivered together with those of later steps, once `interval_s` have passed since the last delivery.

Invariant: the first and the last tokens of a request are never held, and nothing is held while new work begins (the
server calls `rest` before it accepts a request).
"""

from __future__ import annotations

from penstock.engine.request import Delta

CROWD = 8
"""Requests below which every step is delivered."""
CPU_INTERVAL_S = 0.04
"""Twenty-five times a second: faster than anyone reads."""


def pick_interval(wanted: float | None, device: str) -> float:
    """Seconds between deliveries: as configured, or the default for `device`."""
    if wanted is not None:
        return wanted
    return CPU_INTERVAL_S if device == "cpu" else 0.0


class Pacing:
    """Holds deltas back and says which are due. With an interval of 0 everything is always due."""

    def __init__(self, interval_s: float = 0.0) -> None:
        self._interval_s = interval_s
        self._held: dict[str, Delta] = {}
        self._delivered_at = float("-inf")

    def due(self, deltas: list[Delta], running: int, now: float) -> list[Delta]:
        """The deltas to deliver now, of this step and of earlier ones; `running`: requests that share the engine."""
        if self._interval_s == 0 or (running < CROWD and not self._held):
            return deltas
        held, urgent = self._held, []
        for delta in deltas:
            earlier = held.setdefault(delta.request_id, delta)
            if earlier is not delta:
                earlier.extend(delta)
            if delta.finish_reason is not None or delta.cached_tokens is not None:  # its last or its first delta
                urgent.append(held.pop(delta.request_id))
        if running < CROWD or now - self._delivered_at >= self._interval_s:
            self._delivered_at = now
            urgent += self.rest()
        return urgent

    def rest(self) -> list[Delta]:
        """Everything that is still held."""
        if not self._held:
            return []
        held = list(self._held.values())
        self._held.clear()
        return held
