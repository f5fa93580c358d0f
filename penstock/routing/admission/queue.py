"""The interface of admission queues and its values: classes, entries, capacity, state.

There is one queue per model. An entry waits, is granted (it may run), or is dropped. Invariant of every queue: the
granted entries fit the capacity (or there is only one), no entry is granted twice, and when the next entry in order
fits, it is granted at once.
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
"""Ranks of the classes; the smallest goes first."""

Outcome = Literal["granted", "dropped"]


class QueueEntry(msgspec.Struct, frozen=True):
    """A request in a model's queue."""

    id: str
    tenant: str
    rank: int = STANDARD
    weight: float = 1.0
    """The tenant's share relative to other tenants of the class."""
    cost: float = 1.0
    """Expected work in prompt tokens; see `cost_of`."""
    kv_tokens: int = 0
    """Expected use of the KV cache in tokens."""
    slots: int = 1
    """Sequences that it runs in parallel."""
    arrived: float = 0.0


OUTPUT_COST = 4.0
"""Work of a generated token relative to a prompt token: each takes a step of its own."""


def cost_of(fresh_tokens: int, output_tokens: int) -> float:
    """Work of a request, in prompt tokens; cached tokens are free."""
    return max(fresh_tokens, 1) + OUTPUT_COST * output_tokens


class Capacity(msgspec.Struct, frozen=True):
    """What a model's engines can run at one time. None: no known limit."""

    slots: int | None = None
    kv_tokens: int | None = None
    replicas: int = 1
    strict: bool = False
    """An entry with more slots than there are never fits, not even alone: the others belong to somebody."""


class QueueState(msgspec.Struct, frozen=True):
    """A snapshot of a queue, from the point of view of one tenant in one class."""

    in_flight: int = 0
    """Slots held by granted entries."""
    kv_tokens: int = 0
    """KV cache tokens held by granted entries."""
    queued: tuple[int, int, int] = (0, 0, 0)
    """Waiting entries, by class."""
    work: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Cost of the waiting entries, by class."""
    rates: tuple[float, float, float] | None = None
    """Drain rate available to each class (cost per second while entries wait), after the classes above it. None: not
    known yet."""
    own_work: float = 0.0
    """Cost of the tenant's waiting entries in the class."""
    active_weight: float = 0.0
    """Sum of the weights of tenants that wait in the class."""
    excess: float = 0.0
    """How far the tenant's counter is ahead of the class's virtual time; 0: not at all."""

    own_age_s: float | None = None
    """Age of the tenant's newest waiting entry in the class; None: there is none, as far as known."""

    @property
    def depth(self) -> int:
        return sum(self.queued)


def max_waiting(config: AdmissionConfig, capacity: Capacity) -> int:
    """Maximum number of waiting entries."""
    return config.queue * max(capacity.replicas, 1)


def class_max_wait_s(config: AdmissionConfig, rank: int) -> float:
    """Maximum wait of an entry of this class, in seconds."""
    return config.batch_wait_s if rank == BATCH else config.wait_s


class AdmissionQueue(ABC):
    """The queue of one model. Only `enter` may take time; the other calls return at once, with their work done or under
    way."""

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def enter(self, entry: QueueEntry, capacity: Capacity) -> asyncio.Future[Outcome]:
        """Adds an entry; the future resolves, now or later, to its outcome. A granted entry holds its part of the
        capacity until `release`; a dropped one holds nothing."""

    @abstractmethod
    def leave(self, id: str) -> None:
        """Removes a waiting entry. One that was granted in the meantime is released as unused. Unknown ids are
        ignored."""

    @abstractmethod
    def release(self, id: str, used: float) -> None:
        """Ends a granted entry; `used` is its actual cost. Unknown ids are ignored."""

    @abstractmethod
    def state(self, tenant: str, rank: int) -> QueueState:
        """The queue's state as last known here."""

    @abstractmethod
    def rate(self) -> float:
        """Drain rate: cost per second that leaves the queue while entries wait; 0 when it is not known."""


ReadCapacity = Callable[[], Capacity]
"""Reads the current capacity."""
