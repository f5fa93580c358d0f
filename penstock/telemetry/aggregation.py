"""Merges the metrics of several gateway processes; a scrape of any of them shows the result.

Invariant: a counter never falls because a process died. Its last known counts are kept (`lasting`); its gauges are
dropped.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.telemetry.exposition import Readings, with_added


def merged(processes: Iterable[list[Readings]]) -> list[Readings]:
    """One list of families; each sample is the sum or the maximum over the processes, as its family says."""
    families: dict[str, Readings] = {}
    for readings in processes:
        for family in readings:
            found = families.get(family.head)
            if found is None:
                families[family.head] = Readings(
                    family.head,
                    family.kind,
                    family.merge,
                    dict(family.samples),
                    dict(family.exemplars),
                    dict(family.added),
                )
                continue
            with_added(found.added, family.added)
            found.exemplars.update(family.exemplars)
            if family.merge == "sum":
                for prefix, value in family.samples.items():
                    found.samples[prefix] = found.samples.get(prefix, 0) + value
            else:
                for prefix, value in family.samples.items():
                    found.samples[prefix] = max(found.samples.get(prefix, value), value)
    for family in families.values():
        with_added(family.samples, family.added)
        family.added.clear()
    return list(families.values())


def lasting(readings: list[Readings]) -> list[Readings]:
    """The part of a process's metrics that is kept after its death: what it counted itself."""
    return [family for family in readings if family.merge == "sum" and family.kind in ("counter", "histogram")]
