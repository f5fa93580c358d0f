"""The metrics of several processes as one: what a scrape of any of them shows.

Invariant: a counter that was shown never falls because a process died: what it had counted when it was last heard stays
(`lasting`), and its gauges go with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.telemetry.exposition import Readings


def merged(processes: Iterable[list[Readings]]) -> list[Readings]:
    """One list of families, each sample summed or the largest of all processes, as its family says."""
    families: dict[str, Readings] = {}
    for readings in processes:
        for family in readings:
            found = families.get(family.head)
            if found is None:
                families[family.head] = Readings(
                    family.head, family.kind, family.merge, dict(family.samples), dict(family.exemplars)
                )
                continue
            found.exemplars.update(family.exemplars)
            if family.merge == "sum":
                for prefix, value in family.samples.items():
                    found.samples[prefix] = found.samples.get(prefix, 0) + value
            else:
                for prefix, value in family.samples.items():
                    found.samples[prefix] = max(found.samples.get(prefix, value), value)
    return list(families.values())


def lasting(readings: list[Readings]) -> list[Readings]:
    """What of a process's readings outlives it: what it counted itself."""
    return [family for family in readings if family.merge == "sum" and family.kind in ("counter", "histogram")]
