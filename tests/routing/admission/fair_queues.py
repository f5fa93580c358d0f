"""The order in memory and the order in Redis behind one interface, for tests that hold both to the same promises."""

from __future__ import annotations

from typing import Any, Protocol

from penstock.config.routing import OrderName
from penstock.routing.admission.fair_queue import Changes, Line
from penstock.routing.admission.queue import Entry, Room, Standing
from penstock.routing.admission.redis import DEAD_S, SCRIPT, arguments_of, read_standing


class AnyLine(Protocol):
    def enter(self, entry: Entry, room: Room, most: int, now: float) -> Changes: ...

    def leave(self, id: str, room: Room, now: float) -> Changes: ...

    def release(self, id: str, used: float, room: Room, now: float) -> Changes: ...

    def tick(self, room: Room, now: float) -> Changes: ...

    def standing(self, tenant: str, rank: int, now: float) -> Standing: ...


class ScriptLine:
    """The script that gateways run, through a plain client of a real server."""

    def __init__(self, client: Any, order: OrderName = "fair", ageing_s: float = 30.0, gateway: str = "g") -> None:
        self._script = client.register_script(SCRIPT)
        self._order = order
        self._ageing_s = ageing_s
        self._gateway = gateway
        self._room = Room()
        self.call("restore", Room(), -1, 0.0, [])

    def enter(self, entry: Entry, room: Room, most: int, now: float) -> Changes:
        return self.call("enter", room, most, now, arguments_of(entry, now - entry.arrived))[0]

    def leave(self, id: str, room: Room, now: float) -> Changes:
        return self.call("leave", room, -1, now, [id])[0]

    def release(self, id: str, used: float, room: Room, now: float) -> Changes:
        return self.call("release", room, -1, now, [id, used])[0]

    def tick(self, room: Room, now: float) -> Changes:
        return self.call("tick", room, -1, now, [])[0]

    def standing(self, tenant: str, rank: int, now: float) -> Standing:
        return self.call("tick", Room(slots=0, kv_tokens=0), -1, now, [], tenant, rank)[1]

    def call(
        self, operation: str, room: Room, most: int, now: float, rest: list[Any], tenant: str = "", rank: int = 0
    ) -> tuple[Changes, Standing]:
        slots = -1 if room.slots is None else room.slots
        kv = -1 if room.kv_tokens is None else room.kv_tokens
        head = [operation, now, self._gateway, slots, kv, most, self._order, self._ageing_s, DEAD_S, tenant, rank]
        known, granted, dropped, *values = self._script(keys=["queue:"], args=[*head, *rest])
        assert known == 1 or operation == "restore"
        standing = read_standing([float(value) for value in values])
        return Changes([id.decode() for id in granted], [id.decode() for id in dropped]), standing


def make_line(kind: str, client: Any, order: OrderName = "fair", ageing_s: float = 30.0) -> AnyLine:
    if kind == "memory":
        return Line(order, ageing_s)
    client.flushdb()
    return ScriptLine(client, order, ageing_s)
