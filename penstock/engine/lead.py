"""When the next step must be launched, so that the device does not run dry and prompts that come late still get in.

A step is launched while the one before it runs, and prompts that come after the launch wait for one step more. So
the launch is put off until shortly before the device is done. When that will be is what the step is expected to take
(`pace`), counted from where the device began with it: the end of the step before, as seen when it was waited for.
"""

from __future__ import annotations

_LEAST_S, _MOST_S = 0.0005, 0.004
"""Besides what launching takes. It grows when the device had run dry, and shrinks slowly while it does not."""
_GROWS, _SHRINKS = 1.3, 0.995
_UNSURE = 0.04
"""Part of the expected time that a step may be over early."""
_SMOOTH = 0.1


class Lead:
    """Of an engine that keeps one step in flight. Times are the engine's clock."""

    def __init__(self) -> None:
        self._safety_s = 0.001
        self._waited = False
        """Whether the last launch was put off."""
        self._launch_s = 0.001
        """What scheduling and launching a step of decodes takes the host."""
        self._expected: list[float] = []
        """What the steps in flight should take; the first has begun, or is about to."""
        self._began = 0.0
        """When the device began with the first of them."""

    def launched(self, expected_s: float, began: float, now: float, decodes: bool) -> None:
        """A step was launched between `began` and `now`; `expected_s` is 0 where nothing is known. `decodes`: it has no
        prompts, so that launching it took what it will take again."""
        if not self._expected:
            self._began = began
        self._expected.append(expected_s)
        if decodes:
            self._launch_s += _SMOOTH * (now - began - self._launch_s)

    def landed(self, *, blocked: bool, now: float) -> None:
        """The first step in flight was waited for. `blocked`: until the device was done with it, so that it is done now
        and not earlier."""
        if self._expected:
            ends = self._began + self._expected.pop(0)
            self._began = now if blocked else min(ends, now)
        if self._waited:
            self._waited = False
            self._safety_s *= _SHRINKS if blocked else _GROWS
            self._safety_s = min(max(self._safety_s, _LEAST_S), _MOST_S)

    def spare_s(self, now: float) -> float:
        """How long launching can wait; 0 where that is not known."""
        if len(self._expected) != 1 or self._expected[0] <= 0.0:
            return 0.0
        done = self._began + self._expected[0] * (1 - _UNSURE)
        spare = done - self._launch_s - self._safety_s - now
        self._waited = self._waited or spare > 0.0
        return max(spare, 0.0)
