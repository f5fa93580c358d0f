"""How often the tokens of a crowd go out.

A token on its way to a client costs about a tenth of a millisecond of CPU in all: the engine's message, the gateway,
two sockets. Where the engine computes on the same cores, that is taken from it. So beyond a few requests tokens wait
for those of the next step, until `interval_s` have passed since the last delivery.

Invariant: a request's first and last words never wait, and nothing waits behind work that is only about to begin
(whoever takes in a request calls `rest` first).
"""

from __future__ import annotations

from penstock.engine.request import Delta

CROWD = 8
"""Requests below which every step is delivered."""
CPU_INTERVAL_S = 0.04
"""Twenty-five times a second: more often than anybody reads."""


def pick_interval(wanted: float | None, device: str) -> float:
    """Seconds between deliveries of an engine on `device`, for which nothing else may have been asked."""
    if wanted is not None:
        return wanted
    return CPU_INTERVAL_S if device == "cpu" else 0.0


class Pacing:
    """Holds deltas back and says which are due. 0: all of them, always."""

    def __init__(self, interval_s: float = 0.0) -> None:
        self._interval_s = interval_s
        self._held: dict[str, Delta] = {}
        self._delivered_at = float("-inf")

    def due(self, deltas: list[Delta], running: int, now: float) -> list[Delta]:
        """What to deliver now, of a step and of those before it; `running`: how many requests share the engine."""
        if self._interval_s == 0 or (running < CROWD and not self._held):
            return deltas
        held, urgent = self._held, []
        for delta in deltas:
            earlier = held.setdefault(delta.request_id, delta)
            if earlier is not delta:
                earlier.extend(delta)
            if delta.finish_reason is not None or delta.cached_tokens is not None:  # its last or its first
                urgent.append(held.pop(delta.request_id))
        if running < CROWD or now - self._delivered_at >= self._interval_s:
            self._delivered_at = now
            urgent += self.rest()
        return urgent

    def rest(self) -> list[Delta]:
        """Everything that is held."""
        if not self._held:
            return []
        held = list(self._held.values())
        self._held.clear()
        return held
