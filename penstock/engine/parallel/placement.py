"""Which shard holds which experts of a layer: whole ones, with copies of those that many tokens choose.

Every shard has the same number of slots. What is left when each expert has one goes to copies of the most visited;
then the heaviest go to the lightest shards. Plain functions of numbers: every rank computes the same from the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engine.models.moe_config import LayerTable
from penstock.errors import ConfigError


def slots_per_shard(experts: int, shards: int, copies: int) -> int:
    """Slots of a shard: its part of the experts, and `copies` more; never more than there are experts."""
    return min(experts, -(-experts // shards) + copies)


def place(loads: Sequence[float], shards: int, slots: int) -> LayerTable:
    """[shard][slot] of experts for the given visits of each expert."""
    experts = len(loads)
    if shards * slots < experts or slots > experts:
        raise ConfigError(f"{experts} experts do not fit {shards} shards of {slots} slots")
    copies = _copies(loads, shards, shards * slots)
    weights = [load / count for load, count in zip(loads, copies, strict=True)]
    held: list[list[int]] = [[] for _ in range(shards)]
    carried = [0.0] * shards
    for expert in sorted(range(experts), key=lambda e: (-weights[e], e)):
        for copy in range(copies[expert]):
            open_shards = [s for s in range(shards) if len(held[s]) < slots and (not copy or expert not in held[s])]
            if not open_shards:
                break  # the only room is where it is already; the slot goes to another expert below
            # Of equally loaded shards the emptiest, so that the heavy ones come to different shards.
            shard = min(open_shards, key=lambda s: (carried[s], len(held[s]), s))
            held[shard].append(expert)
            carried[shard] += weights[expert]
    for mine in held:
        while len(mine) < slots:
            mine.append(max((e for e in range(experts) if e not in mine), key=lambda e: (weights[e], -e)))
    return tuple(tuple(sorted(mine)) for mine in held)


def _copies(loads: Sequence[float], shards: int, slots: int) -> list[int]:
    """How often each expert is there: once, and again where a copy has the most to carry."""
    copies = [1] * len(loads)
    for _ in range(slots - len(loads)):
        again = [expert for expert, count in enumerate(copies) if count < shards]
        copies[max(again, key=lambda e: (loads[e] / copies[e], -copies[e], -e))] += 1
    return copies


def shard_loads(table: LayerTable, loads: Sequence[float]) -> list[float]:
    """What each shard has to carry: copies share the visits of their expert."""
    copies = [0] * len(loads)
    for held in table:
        for expert in held:
            copies[expert] += 1
    return [sum(loads[expert] / copies[expert] for expert in held) for held in table]


def imbalance(table: LayerTable, loads: Sequence[float]) -> float:
    """The load of the most loaded shard over the mean: 1 is even, the number of shards is all on one."""
    carried = shard_loads(table, loads)
    total = sum(carried)
    return max(carried) * len(carried) / total if total else 1.0


def keep_in_place(old: LayerTable, new: LayerTable) -> LayerTable:
    """`new` with its shards and slots in another order, such that few experts move."""
    free = list(range(len(old)))
    result: list[tuple[int, ...]] = [()] * len(old)
    for held in sorted(new, key=lambda held: -max(len({*held} & {*mine}) for mine in old)):
        shard = max(free, key=lambda s: (len({*held} & {*old[s]}), -s))
        free.remove(shard)
        arriving = iter([expert for expert in held if expert not in old[shard]])
        result[shard] = tuple(expert if expert in held else next(arriving) for expert in old[shard])
    return tuple(result)


def moves(old: LayerTable, new: LayerTable, shard: int) -> list[tuple[int, int]]:
    """Slots of a shard that get another expert, and which."""
    pairs = enumerate(zip(old[shard], new[shard], strict=True))
    return [(slot, after) for slot, (before, after) in pairs if before != after]
