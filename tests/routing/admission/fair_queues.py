"""The fair queue in memory and in Redis behind one interface, for tests that check both."""

from __future__ import annotations

from typing import Any, Protocol

from penstock.config.routing import OrderName
from penstock.routing.admission.fair_queue import Changes, FairQueue
from penstock.routing.admission.queue import Capacity, QueueEntry, QueueState
from penstock.routing.admission.redis import DEAD_S, SCRIPT, arguments_of, read_state


class AnyFairQueue(Protocol):
    def enter(self, entry: QueueEntry, capacity: Capacity, most: int, now: float) -> Changes: ...

    def leave(self, id: str, capacity: Capacity, now: float) -> Changes: ...

    def release(self, id: str, used: float, capacity: Capacity, now: float) -> Changes: ...

    def tick(self, capacity: Capacity, now: float) -> Changes: ...

    def state(self, tenant: str, rank: int, now: float) -> QueueState: ...


class ScriptFairQueue:
    """The script that gateways run, through a plain client of a real server."""

    def __init__(self, client: Any, order: OrderName = "fair", ageing_s: float = 30.0, gateway: str = "g") -> None:
        self._script = client.register_script(SCRIPT)
        self._order = order
        self._ageing_s = ageing_s
        self._gateway = gateway
        self._capacity = Capacity()
        self.call("restore", Capacity(), -1, 0.0, [])

    def enter(self, entry: QueueEntry, capacity: Capacity, most: int, now: float) -> Changes:
        return self.call("enter", capacity, most, now, arguments_of(entry, now - entry.arrived))[0]

    def leave(self, id: str, capacity: Capacity, now: float) -> Changes:
        return self.call("leave", capacity, -1, now, [id])[0]

    def release(self, id: str, used: float, capacity: Capacity, now: float) -> Changes:
        return self.call("release", capacity, -1, now, [id, used])[0]

    def tick(self, capacity: Capacity, now: float) -> Changes:
        return self.call("tick", capacity, -1, now, [])[0]

    def state(self, tenant: str, rank: int, now: float) -> QueueState:
        return self.call("tick", Capacity(slots=0, kv_tokens=0), -1, now, [], tenant, rank)[1]

    def call(
        self,
        operation: str,
        capacity: Capacity,
        most: int,
        now: float,
        rest: list[Any],
        tenant: str = "",
        rank: int = 0,
    ) -> tuple[Changes, QueueState]:
        slots = -1 if capacity.slots is None else capacity.slots
        kv = -1 if capacity.kv_tokens is None else capacity.kv_tokens
        head = [operation, now, self._gateway, slots, kv, most, self._order, self._ageing_s, DEAD_S, tenant, rank]
        known, granted, dropped, *values = self._script(keys=["queue:"], args=[*head, *rest])
        assert known == 1 or operation == "restore"
        state = read_state([float(value) for value in values])
        return Changes([id.decode() for id in granted], [id.decode() for id in dropped]), state


def make_line(kind: str, client: Any, order: OrderName = "fair", ageing_s: float = 30.0) -> AnyFairQueue:
    if kind == "memory":
        return FairQueue(order, ageing_s)
    client.flushdb()
    return ScriptFairQueue(client, order, ageing_s)
