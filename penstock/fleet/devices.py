"""Which GPUs of a machine a replica takes: a pure function of its settings and of what else runs there.

A claim is for so many neighbouring devices, or for certain ones, or for a share of one. The models of a time-slice
group have one claim together, because one of them is awake at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.config import ModelConfig

EXACT = 1e-9


@dataclass(frozen=True, slots=True)
class Claim:
    """What one replica takes of the devices of its machine."""

    devices: int = 0
    """How many; 0: it runs on the CPU."""
    certain: tuple[int, ...] = ()
    """Which ones, if the configuration names them."""
    share: float = 1.0
    """Of the memory of each."""
    group: str = ""
    """Replicas of one group have it in turn."""


NOTHING = Claim()


def claim(model: ModelConfig, available: int) -> Claim:
    """Of a replica with these settings, in a fleet whose machines have up to `available` devices."""
    reserved = None if model.resources is None else model.resources.gpus
    if model.device == "cpu" or (model.device == "auto" and not available) or reserved == 0:
        return Claim(group=model.time_slice)
    ranks = model.tensor_parallel * model.pipeline_parallel if reserved is None else math.ceil(reserved)
    share = model.memory_share or 1.0
    if reserved is not None and reserved < 1:
        share = reserved
    certain: tuple[int, ...] = ()
    if model.devices:
        certain = tuple(sorted({int(name.partition(":")[2] or 0) for name in model.devices if name.startswith("cuda")}))
    elif ":" in model.device:
        first = int(model.device.partition(":")[2])
        certain = tuple(range(first, first + ranks))
    return Claim(len(certain) or ranks, certain, share, model.time_slice)


def packed(claims: Iterable[Claim], count: int) -> bool:
    """Whether all of these fit on a machine with `count` devices."""
    used = [0.0] * count
    whole, seen = [], set[str]()
    for one in sorted(claims, key=lambda one: (not one.certain, -one.devices, -one.share)):
        if not one.devices or (one.group and one.group in seen):
            continue
        seen.add(one.group)
        whole.append(one)
    return all(take(used, one) is not None for one in whole)


def take(used: list[float], one: Claim) -> tuple[int, ...] | None:
    """Takes devices for a claim; None when there are none. `used`: the share of each that is taken, which changes."""
    places: Sequence[tuple[int, ...]] = (
        [one.certain]
        if one.certain
        else [tuple(range(first, first + one.devices)) for first in range(len(used) - one.devices + 1)]
    )
    # A device that is shared already is preferred, so that whole ones stay whole.
    fitting = [place for place in places if all(at < len(used) and used[at] + one.share <= 1 + EXACT for at in place)]
    if not fitting:
        return None
    best = max(fitting, key=lambda place: sum(used[at] for at in place))
    for at in best:
        used[at] += one.share
    return best
