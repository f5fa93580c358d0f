"""One admission queue in memory: classes, fairness between tenants, ageing, and which entry a full queue drops.

Fairness uses virtual token counters: the cost served to a tenant, divided by its weight. The tenant with the smallest
counter goes next. A tenant that returns after a pause is lifted to the class's virtual time (the counter of the last
granted tenant, before that grant), so a pause earns no credit; a tenant that was served more than others keeps its
counter.

Ageing: one grant in `AGEING_EVERY` goes to the oldest entry, if it has waited longer than `ageing_s`. So no order
starves anybody, and urgent classes lose at most a tenth of the grants.

A full queue drops the newest entry of the tenant with the most waiting work by weight, in the lowest class that has
entries: a flood displaces only itself. A plain object; the caller passes the time. `fair_queue.lua` is the same queue
as a Redis script.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.config.routing import OrderName
from penstock.routing.admission.decision import fits
from penstock.routing.admission.queue import CLASSES, Capacity, QueueEntry, QueueState
from penstock.routing.rate import SETTLED_S, BusyRate

AGEING_EVERY = 10
DRAIN_FADE_S = 20.0
"""Time constant of the drain rate: where each request takes many seconds, few end per second."""
LEAST_RATE = 0.02
"""Part of the drain rate assumed for a class that got nothing recently."""
SERVICE_STEP = 0.1
"""Weight of the newest entry in the mean time from grant to release."""
COUNTERS = 4096
"""Counters per class beyond which those at or below the virtual time, which carry no information, are deleted."""


@dataclass(slots=True)
class Changes:
    """Ids of the entries that a call granted or dropped."""

    granted: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Tenant:
    """A tenant's waiting entries in one class."""

    weight: float
    entries: dict[str, QueueEntry] = field(default_factory=dict)
    work: float = 0.0


@dataclass(slots=True)
class _Class:
    virtual_time: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)
    tenants: dict[str, _Tenant] = field(default_factory=dict)
    """Tenants with waiting entries."""
    weight: float = 0.0
    """Sum of the weights of those tenants."""
    count: int = 0
    work: float = 0.0


@dataclass(slots=True)
class _Granted:
    entry: QueueEntry
    at: float


class FairQueue:
    """The waiting and the granted entries of one model."""

    def __init__(self, order: OrderName = "fair", ageing_s: float = 30.0) -> None:
        self._order = order
        self._ageing_s = ageing_s
        self._classes = tuple(_Class() for _ in CLASSES)
        self._waiting: dict[str, QueueEntry] = {}
        self._granted: dict[str, _Granted] = {}
        self._in_flight = 0
        self._kv_tokens = 0
        self._cost = 0.0
        self._service_s = 0.0
        self._first_grant: float | None = None
        self._grants = 0
        self._drain = BusyRate(DRAIN_FADE_S, len(CLASSES))

    @property
    def waits(self) -> bool:
        """Whether any entry is waiting."""
        return bool(self._waiting)

    @property
    def held(self) -> tuple[int, int]:
        """Slots and KV tokens of the granted entries."""
        return self._in_flight, self._kv_tokens

    def enter(self, entry: QueueEntry, capacity: Capacity, most: int, now: float) -> Changes:
        """Adds an entry and grants what fits; drops one entry if more than `most` wait then."""
        if not self._waiting and self._fits(entry, capacity):
            self._lift(entry)
            self._take(entry, now)
            return Changes([entry.id])
        changes = Changes()
        self._push(entry, now)
        self._grant(capacity, now, changes)
        if len(self._waiting) > most:
            victim = self._least()
            self._pull(victim, now)
            changes.dropped.append(victim.id)
        return changes

    def leave(self, id: str, capacity: Capacity, now: float) -> Changes:
        entry = self._waiting.get(id)
        if entry is None:
            return self.release(id, 0.0, capacity, now)
        self._pull(entry, now)
        return self.tick(capacity, now)

    def release(self, id: str, used: float, capacity: Capacity, now: float) -> Changes:
        granted = self._granted.pop(id, None)
        if granted is None:
            return Changes()
        entry = granted.entry
        self._in_flight -= entry.slots
        self._kv_tokens -= entry.kv_tokens
        self._cost -= entry.cost
        self._charge(entry, used - entry.cost)
        if used > 0:
            seconds = now - granted.at
            self._service_s += (SERVICE_STEP if self._service_s else 1.0) * (seconds - self._service_s)
        return self.tick(capacity, now)

    def tick(self, capacity: Capacity, now: float) -> Changes:
        """Grants the next entries as long as they fit."""
        changes = Changes()
        self._grant(capacity, now, changes)
        return changes

    def adopt(self, entry: QueueEntry, now: float) -> None:
        """Takes over an entry that another queue has granted."""
        self._hold(entry, now)

    def state(self, tenant: str, rank: int, now: float) -> QueueState:
        group = self._classes[rank]
        own = group.tenants.get(tenant)
        return QueueState(
            in_flight=self._in_flight,
            kv_tokens=self._kv_tokens,
            queued=(self._classes[0].count, self._classes[1].count, self._classes[2].count),
            work=(self._classes[0].work, self._classes[1].work, self._classes[2].work),
            rates=self._rates(now),
            own_work=own.work if own else 0.0,
            active_weight=group.weight,
            excess=max(group.counters.get(tenant, 0.0) - group.virtual_time, 0.0),
            own_age_s=now - next(reversed(own.entries.values())).arrived if own else None,
        )

    def _rates(self, now: float) -> tuple[float, float, float] | None:
        """The drain rate measured while entries waited; before that, the running cost by the mean service time."""
        total = self._drain.per_s(now)
        if total is not None:
            left = [max(self._drain.per_s(now, rank) or 0.0, LEAST_RATE * total) for rank in (1, 2)]
            return total, left[0], left[1]
        # Until the first entry ends, the service time is at least the time since the first grant.
        service_s = self._service_s or (now - self._first_grant if self._first_grant is not None else 0.0)
        if service_s < SETTLED_S or self._cost <= 0:
            return None
        total = self._cost / service_s
        return total, total, total

    def _push(self, entry: QueueEntry, now: float) -> None:
        if not self._waiting:
            self._drain.busy(now, True)
        self._waiting[entry.id] = entry
        group = self._classes[entry.rank]
        tenant = group.tenants.get(entry.tenant)
        if tenant is None:
            self._lift(entry)
            tenant = group.tenants[entry.tenant] = _Tenant(entry.weight)
            group.weight += entry.weight
        tenant.entries[entry.id] = entry
        tenant.work += entry.cost
        group.count += 1
        group.work += entry.cost

    def _pull(self, entry: QueueEntry, now: float) -> None:
        del self._waiting[entry.id]
        group = self._classes[entry.rank]
        tenant = group.tenants[entry.tenant]
        del tenant.entries[entry.id]
        tenant.work -= entry.cost
        group.count -= 1
        group.work -= entry.cost
        if not tenant.entries:
            del group.tenants[entry.tenant]
            group.weight -= tenant.weight
        if not group.count:
            group.work = group.weight = 0.0  # clear rounding errors
        if not self._waiting:
            self._drain.busy(now, False)

    def _grant(self, capacity: Capacity, now: float, changes: Changes) -> None:
        while self._waiting:
            entry = self._next(now)
            if not self._fits(entry, capacity):
                return
            self._drain.add(now, entry.cost, entry.rank)
            self._pull(entry, now)
            self._take(entry, now)
            changes.granted.append(entry.id)

    def _fits(self, entry: QueueEntry, capacity: Capacity) -> bool:
        return fits(entry, self._in_flight, self._kv_tokens, capacity)

    def _lift(self, entry: QueueEntry) -> None:
        """Lifts the counter of a tenant that had nothing waiting to the virtual time: a pause earns no credit."""
        group = self._classes[entry.rank]
        group.counters[entry.tenant] = max(group.counters.get(entry.tenant, 0.0), group.virtual_time)

    def _take(self, entry: QueueEntry, now: float) -> None:
        """Grants an entry that is no longer waiting."""
        group = self._classes[entry.rank]
        group.virtual_time = max(group.virtual_time, group.counters[entry.tenant])
        self._charge(entry, entry.cost)
        self._hold(entry, now)
        self._grants += 1
        if self._first_grant is None:
            self._first_grant = now

    def _hold(self, entry: QueueEntry, now: float) -> None:
        self._granted[entry.id] = _Granted(entry, now)
        self._in_flight += entry.slots
        self._kv_tokens += entry.kv_tokens
        self._cost += entry.cost

    def _charge(self, entry: QueueEntry, cost: float) -> None:
        counters, virtual_time = self._classes[entry.rank].counters, self._classes[entry.rank].virtual_time
        counters[entry.tenant] = counters.get(entry.tenant, virtual_time) + cost / entry.weight
        if len(counters) > COUNTERS:
            waiting = self._classes[entry.rank].tenants
            for name in [n for n, value in counters.items() if value <= virtual_time and n not in waiting]:
                del counters[name]

    def _next(self, now: float) -> QueueEntry:
        """The entry to grant next; at least one is waiting."""
        if self._order == "fcfs":
            return _oldest(self._waiting.values())
        if self._grants % AGEING_EVERY == AGEING_EVERY - 1:
            oldest = _oldest(self._waiting.values())
            if now - oldest.arrived > self._ageing_s:
                return oldest
        if self._order == "sjf":
            return min(self._waiting.values(), key=lambda entry: (entry.cost, entry.id))
        group = next(group for group in self._classes if group.count)
        if self._order == "priority":
            return _oldest(entry for tenant in group.tenants.values() for entry in tenant.entries.values())
        name = min(group.tenants, key=lambda name: (group.counters[name], name))
        return _oldest(group.tenants[name].entries.values())

    def _least(self) -> QueueEntry:
        """The entry to drop: the newest one of the tenant with the most work by weight in the lowest class."""
        group = next(group for group in reversed(self._classes) if group.count)
        name = max(group.tenants, key=lambda name: (group.tenants[name].work / group.tenants[name].weight, name))
        return max(group.tenants[name].entries.values(), key=lambda entry: (entry.arrived, entry.id))


def _oldest(entries: Iterable[QueueEntry]) -> QueueEntry:
    return min(entries, key=lambda entry: (entry.arrived, entry.id))
