"""What is limited, and the promises every store of limits keeps.

A limit is a number per window for one subject (a key, a user, a tenant, a model of a tenant): requests or tokens in a
sliding minute, requests at one time, money in a day or month. A reservation takes from all limits of a request or from
none. Settling gives back what was reserved and not used; a reservation whose gateway died runs out by itself.

Windows slide in steps of a sixtieth: what was taken counts until its step has left the window entirely, so the sum over
any window never exceeds the limit. Everything is whole numbers: requests, tokens, nanodollars.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Metric = Literal["requests", "tokens", "concurrent", "budget"]
STEPS = 60


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `most` of a metric for `subject` within `window_s`; concurrency has no window but the longest life of a
    reservation, after which it counts as lost."""

    subject: str
    """Unique per metric and window, for example `tenant:acme:tokens`."""
    metric: Metric
    most: int
    window_s: float

    @property
    def step_s(self) -> float:
        return self.window_s / STEPS


@dataclass(frozen=True, slots=True)
class Amounts:
    """What a request takes of each metric."""

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
    """Where a limit stands after a decision."""

    limit: Limit
    used: int
    reset_s: float
    """Until all of it is free again, if nothing more is taken."""

    @property
    def remaining(self) -> int:
        return max(0, self.limit.most - self.used)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Which limit stood in the way, and when it would not. None: never, the request alone is larger than the limit."""

    limit: Limit
    retry_s: float | None


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of a reservation; `refusal` is None when it was granted."""

    states: tuple[LimitState, ...]
    refusal: Refusal | None = None


class LimitStore(ABC):
    """Where usage is counted. Calls are atomic: no two reservations ever see the same free amount."""

    @abstractmethod
    async def reserve(self, id: str, limits: Sequence[Limit], amounts: Amounts) -> Decision:
        """Take `amounts` from every limit, or from none."""

    @abstractmethod
    async def settle(self, id: str, limits: Sequence[Limit], reserved: Amounts, used: Amounts) -> None:
        """Replace what was reserved by what was used; concurrency is given back. Only the first call counts."""

    async def close(self) -> None:
        """Let go of connections; nothing by default."""
        return
