"""The words of admission: entries, classes, room, states, and what every queue promises.

One queue stands before each model. An entry is granted (it may run), waits, or is dropped. Invariant of every queue:
what is granted at one time fits the room (or is alone), nobody is granted twice, and whenever the entry that is next in
order fits, it is granted at once.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import msgspec

from penstock.config.routing import AdmissionConfig

CLASSES = ("premium", "standard", "batch")
PREMIUM, STANDARD, BATCH = range(3)
"""Rank of a class: smaller goes first."""

Outcome = Literal["granted", "dropped"]


class QueueEntry(msgspec.Struct, frozen=True):
    """A request in front of a model."""

    id: str
    tenant: str
    rank: int = STANDARD
    weight: float = 1.0
    """The tenant's share compared with others of its class."""
    cost: float = 1.0
    """Work it will probably make, in tokens; see `cost_of`."""
    kv_tokens: int = 0
    """Tokens of KV cache it will probably take."""
    slots: int = 1
    """Sequences it runs at one time."""
    arrived: float = 0.0


OUTPUT_COST = 4.0
"""A generated token is this much more work than a prompt token: it takes a step of its own."""


def cost_of(fresh_tokens: int, output_tokens: int) -> float:
    """Work of a request in prompt tokens; what the cache has is free."""
    return max(fresh_tokens, 1) + OUTPUT_COST * output_tokens


class Capacity(msgspec.Struct, frozen=True):
    """What a model's engines can take at one time. None: no limit is known."""

    slots: int | None = None
    kv_tokens: int | None = None
    replicas: int = 1


class QueueState(msgspec.Struct, frozen=True):
    """A queue at one moment, as one tenant of one class sees it."""

    in_flight: int = 0
    """Slots that granted entries hold."""
    kv_tokens: int = 0
    """KV cache that granted entries hold."""
    queued: tuple[int, int, int] = (0, 0, 0)
    """Entries that wait, by class."""
    work: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Their costs."""
    rates: tuple[float, float, float] | None = None
    """Cost that leaves the queue per second while somebody waits, by class: what is left for it by those above. None:
    not known yet."""
    own_work: float = 0.0
    """Cost of what this tenant has waiting in this class."""
    active_weight: float = 0.0
    """Sum of the weights of tenants that wait in this class."""
    excess: float = 0.0
    """How far this tenant is ahead of the class in served cost by weight; 0: not at all."""

    own_age_s: float | None = None
    """How long ago the newest entry came that this tenant has waiting in this class; None: there is none, as far as is
    known."""

    @property
    def depth(self) -> int:
        return sum(self.queued)


def max_waiting(config: AdmissionConfig, capacity: Capacity) -> int:
    """Entries that may wait."""
    return config.queue * max(capacity.replicas, 1)


def class_max_wait_s(config: AdmissionConfig, rank: int) -> float:
    """Seconds that an entry of this class may wait."""
    return config.batch_wait_s if rank == BATCH else config.wait_s


class AdmissionQueue(ABC):
    """The queue of one model. Only `enter` may take time; all else is done, or on its way, when the call returns."""

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def enter(self, entry: QueueEntry, capacity: Capacity) -> asyncio.Future[Outcome]:
        """Take a place, in front of this room; the future tells, at once or later, what became of it. An entry that is
        granted holds its room until `release`; one that was dropped holds nothing."""

    @abstractmethod
    def leave(self, id: str) -> None:
        """Give up waiting. An entry that was granted meanwhile is released as unused. Unknown ids are ignored."""

    @abstractmethod
    def release(self, id: str, used: float) -> None:
        """A granted entry has ended and its work was `used`. Unknown ids are ignored."""

    @abstractmethod
    def state(self, tenant: str, rank: int) -> QueueState:
        """How things are, as far as known here."""

    @abstractmethod
    def rate(self) -> float:
        """Cost that leaves the queue per second while somebody waits; 0 when it is not known."""


ReadCapacity = Callable[[], Capacity]
"""Asks for the room as it is now."""
