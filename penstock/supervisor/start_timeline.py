"""Where the time of a start went: from the supervisor's own process to the moment everything answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.supervisor.unit import Unit


@dataclass(frozen=True, slots=True)
class ChildStart:
    """One process, in seconds after the supervisor's process was made."""

    name: str
    spawned_s: float
    ready_s: float
    phases: dict[str, float]
    """Of an engine, by its own clock; `start` is its interpreter, command line and configuration."""


@dataclass(frozen=True, slots=True)
class StartTimeline:
    """The first start of all processes."""

    prepared_s: float
    """When the supervisor began to start processes. Before, it imports, reads the configuration and finds models."""
    ready_s: float
    children: tuple[ChildStart, ...]

    @classmethod
    def of(cls, units: Sequence[Unit], began: float, prepared_s: float, now: float) -> StartTimeline:
        """`began`: when processes began to be started, by the clock of the units; `prepared_s`: see above."""
        children = tuple(
            ChildStart(
                unit.name,
                round(unit.spawned_at - began + prepared_s, 3),
                round((unit.ready_at or now) - began + prepared_s, 3),
                {} if unit.info is None else dict(unit.info.startup),
            )
            for unit in units
        )
        return cls(round(prepared_s, 3), round(now - began + prepared_s, 3), children)

    def fields(self) -> dict[str, object]:
        """For logs."""
        children = {
            child.name: {"spawned_s": child.spawned_s, "ready_s": child.ready_s, "phases": child.phases}
            for child in self.children
        }
        return {"prepared_s": self.prepared_s, "ready_s": self.ready_s, "children": children}

    def __str__(self) -> str:
        parts = [f"prepared after {self.prepared_s:.1f} s"]
        for child in self.children:
            phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in child.phases.items())
            parts.append(f"{child.name} after {child.ready_s:.1f} s" + (f" ({phases})" if phases else ""))
        return f"start: {'; '.join(parts)}; all ready after {self.ready_s:.1f} s"
