"""Adds up the loads of several engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from penstock.engine.request import EngineLoad, HandoverLoad


def total_load(loads: Sequence[EngineLoad]) -> EngineLoad:
    """The sum of all counters; the adapter state is that of the first engine that reports one."""
    if len(loads) == 1:
        return loads[0]
    total = EngineLoad(
        adapters=next((load.adapters for load in loads if load.adapters is not None), None),
        devices=[device for load in loads for device in load.devices or ()] or None,
    )
    _add_up(total, loads)
    handovers = [load.handover for load in loads if load.handover is not None]
    if handovers:
        total.handover = HandoverLoad()
        _add_up(total.handover, handovers)
    return total


def _add_up(total: EngineLoad | HandoverLoad, parts: Sequence[EngineLoad | HandoverLoad]) -> None:
    for field in dataclasses.fields(total):
        if isinstance(field.default, int | float):
            setattr(total, field.name, sum(getattr(part, field.name) for part in parts))
