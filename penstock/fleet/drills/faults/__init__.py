"""Ways to break a fleet, by name."""

from __future__ import annotations

from penstock.fleet.drills.faults import clock, disk, memory, network, processes, services, weights
from penstock.fleet.drills.run import Fault

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for module in (processes, services, network, disk, weights, clock, memory)
    for fault in module.FAULTS
}
