"""The interface of limit stores and its values.

A limit is an amount per window for one subject (a key, a user, a tenant, a tenant's model): requests or tokens in a
sliding minute, concurrent requests, money in a day or month. A reservation takes from all limits of a request or from
none. Settling returns what was reserved but not used; the reservations of a dead gateway expire.

Windows slide in steps of a sixtieth: an amount counts until its step has left the window entirely, so the sum over any
window never exceeds the limit. All amounts are integers: requests, tokens, nanodollars.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Metric = Literal["requests", "tokens", "concurrent", "budget"]
STEPS = 60


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `most` of a metric for `subject` within `window_s`. For concurrency, the window is the maximum life of a
    reservation, after which it counts as lost."""

    subject: str
    """Unique per metric and window, such as `tenant:acme:tokens`."""
    metric: Metric
    most: int
    window_s: float

    @property
    def step_s(self) -> float:
        return self.window_s / STEPS


@dataclass(frozen=True, slots=True)
class Amounts:
    """What a request uses of each metric."""

    requests: int = 1
    tokens: int = 0
    concurrent: int = 1
    budget: int = 0
    """Nanodollars."""

    def of(self, metric: Metric) -> int:
        value: int = getattr(self, metric)
        return value


@dataclass(frozen=True, slots=True)
class LimitState:
    """The state of a limit after a decision."""

    limit: Limit
    used: int
    reset_s: float
    """Seconds until all of it is free again, if nothing more is used."""

    @property
    def remaining(self) -> int:
        return max(0, self.limit.most - self.used)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The limit that was exceeded, and when to retry. None: never, because the request alone exceeds the limit."""

    limit: Limit
    retry_s: float | None


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of a reservation; `refusal` is None when it was granted."""

    states: tuple[LimitState, ...]
    refusal: Refusal | None = None


class LimitStore(ABC):
    """Counts usage against limits. Calls are atomic: no two reservations can take the same free amount."""

    @abstractmethod
    async def reserve(self, id: str, limits: Sequence[Limit], amounts: Amounts) -> Decision:
        """Takes `amounts` from all limits, or from none."""

    @abstractmethod
    async def settle(self, id: str, limits: Sequence[Limit], reserved: Amounts, used: Amounts) -> None:
        """Replaces what was reserved by what was used and releases concurrency. Only the first call counts."""

    async def states(self, limits: Sequence[Limit]) -> tuple[LimitState, ...]:
        """How much of each limit is used now."""
        nothing, id = Amounts(0, 0, 0, 0), uuid.uuid4().hex
        decision = await self.reserve(id, limits, nothing)
        await self.settle(id, limits, nothing, nothing)
        return decision.states

    async def problem(self) -> str | None:
        """Why all requests are refused at the moment; None: they are counted."""
        return None

    async def close(self) -> None:
        """Closes connections; does nothing by default."""
        return
