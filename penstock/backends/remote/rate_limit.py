"""Limits that a provider reports with its answers, so that nothing is sent into one that is used up.

Both families of headers are read: `x-ratelimit-remaining-requests` with a duration until the limit is full again, and
`anthropic-ratelimit-requests-remaining` with the time at which it is. Between the two it refills evenly, so that the
wait for what is needed is a share of the wait until it is full. A plain object with an injected clock.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

LONGEST_S = 120.0
"""Longer waits are not believed; a request finds out."""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|us|h|m|s|d)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_KINDS = ("requests", "tokens", "input-tokens", "output-tokens")


@dataclass(frozen=True, slots=True)
class _Limit:
    remaining: float
    limit: float | None
    seen_at: float
    full_at: float

    def wait_s(self, need: float, now: float) -> float:
        if self.limit is None or self.limit <= self.remaining or self.full_at <= self.seen_at:
            return self.full_at - now if self.remaining < need else 0.0
        rate = (self.limit - self.remaining) / (self.full_at - self.seen_at)
        left = self.remaining + rate * (now - self.seen_at)
        return (min(need, self.limit) - left) / rate


class RateLimits:
    """What is left of a server's limits."""

    __slots__ = ("_limits", "_until")

    def __init__(self) -> None:
        self._limits: dict[str, _Limit] = {}
        self._until = float("-inf")

    def seen(self, headers: Mapping[str, str], now: float) -> None:
        """Takes note of the headers of an answer."""
        for kind in _KINDS:
            limit = _read(headers, kind, now)
            if limit is not None:
                self._limits[kind] = limit

    def sent(self, tokens: int) -> None:
        """A request with so many prompt tokens is on its way; the next answer tells what is really left."""
        for kind, limit in self._limits.items():
            self._limits[kind] = replace(limit, remaining=max(limit.remaining - _need(kind, tokens), 0.0))

    def refused(self, wait_s: float, now: float) -> None:
        """The server has refused a request because of a limit, for so long."""
        self._until = max(self._until, now + min(wait_s, LONGEST_S))

    def wait_s(self, now: float, tokens: int = 1) -> float:
        """Seconds until a request with so many prompt tokens may be sent; 0: now."""
        waits = [limit.wait_s(_need(kind, tokens), now) for kind, limit in self._limits.items()]
        return min(max(self._until - now, 0.0, *waits), LONGEST_S)

    @property
    def remaining(self) -> dict[str, int]:
        """What was left at the last answer, by kind."""
        return {kind: int(limit.remaining) for kind, limit in self._limits.items()}


def _need(kind: str, tokens: int) -> int:
    return max(tokens, 1) if kind in ("tokens", "input-tokens") else 1


def _read(headers: Mapping[str, str], kind: str, now: float) -> _Limit | None:
    for remaining, limit, reset in (
        (f"x-ratelimit-remaining-{kind}", f"x-ratelimit-limit-{kind}", f"x-ratelimit-reset-{kind}"),
        *((f"anthropic-ratelimit-{kind}-{what}" for what in ("remaining", "limit", "reset")),),
    ):
        left = _number(headers.get(remaining))
        if left is not None:
            return _Limit(left, _number(headers.get(limit)), now, now + _until_full(headers.get(reset)))
    return None


def _number(text: str | None) -> float | None:
    try:
        found = None if text is None else float(text)
    except ValueError:
        return None
    return found if found is not None and 0 <= found < float("inf") else None


def _until_full(text: str | None) -> float:
    """Seconds in a duration (`6m0s`, `20ms`, `12`) or until a time (RFC 3339); 1 where there is none."""
    if text is None:
        return 1.0
    seconds = _number(text)
    if seconds is not None:
        return min(seconds, LONGEST_S)
    parts = _DURATION.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return min(sum(float(number) * _SECONDS[unit] for number, unit in parts), LONGEST_S)
    try:
        return min(max(datetime.fromisoformat(text).timestamp() - time.time(), 0.0), LONGEST_S)
    except (ValueError, OverflowError):
        return 1.0
