"""The slots of one pool, cut into lanes: one for each reservation, and one for everybody.

Pure. Invariants, if each grant is decided on current loads: the lanes together never hold more slots than the pool has;
others never hold what is reserved without `lend`; they take lent slots only while no owner waits, and an owner's lane
gives up no more than others hold of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from penstock.config.pools import ReserveConfig
from penstock.routing.admission.queue import Capacity

COMMON = ""
"""The name of the lane that everybody may use."""


class LaneLoad(msgspec.Struct, frozen=True):
    """What a lane has: slots of granted entries, and entries that wait."""

    held: int = 0
    waiting: int = 0


_IDLE = LaneLoad()


def lanes_of(pool: Capacity, reserves: Sequence[ReserveConfig], loads: Mapping[str, LaneLoad]) -> dict[str, Capacity]:
    """The capacity of each lane of a pool, by the name of the reservation (`COMMON`: everybody's)."""
    if not reserves:
        return {COMMON: pool}
    total = pool.slots
    if total is None:  # the size of an engine is not known, so there is nothing that could be kept from others
        own = {reserve.name: Capacity(reserve.slots, None, pool.replicas, True) for reserve in reserves}
        return {COMMON: pool, **own}
    left = total
    kept: dict[str, int] = {}
    for reserve in reserves:
        wanted = reserve.slots if reserve.slots is not None else max(round((reserve.share or 0.0) * total), 1)
        kept[reserve.name] = min(wanted, left)
        left -= kept[reserve.name]
    common = left
    slots = dict(kept)
    # What others hold beyond their own part, they have borrowed.
    borrowed = max(loads.get(COMMON, _IDLE).held - left, 0)
    for reserve in reserves:
        if not reserve.lend:
            continue
        load, own_slots = loads.get(reserve.name, _IDLE), kept[reserve.name]
        taken = min(borrowed, max(own_slots - load.held, 0))
        borrowed -= taken
        slots[reserve.name] -= taken
        common += taken if load.waiting else max(own_slots - load.held, 0)
    shares = {name: count / total if total else 0.0 for name, count in {COMMON: left, **kept}.items()}
    return {
        name: Capacity(count, _part(pool.kv_tokens, shares[name], count, total), pool.replicas, True)
        for name, count in {COMMON: common, **slots}.items()
    }


def _part(kv_tokens: int | None, share: float, slots: int, total: int) -> int | None:
    """A lane's part of the KV cache: as of the slots, with those that it borrowed or lent."""
    return None if kv_tokens is None else int(kv_tokens * max(share, slots / total if total else 0.0))
