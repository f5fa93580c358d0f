"""Memory that runs out: an engine, then a gateway, may not allocate more than they have."""

from __future__ import annotations

import resource
from pathlib import Path

from penstock.fleet.drills.run import Fault, Stage
from penstock.fleet.drills.target import Target, Victim

HOLD_S = 5.0


async def memory(fleet: Target, stage: Stage) -> None:
    """A process that dies of it is started again; one that lives must go on when there is memory."""
    victims = [fleet.engine_victims[0], fleet.gateway_victims[0]]
    limits = {victim.pid: resource.prlimit(victim.pid, resource.RLIMIT_AS) for victim in victims}
    for victim in victims:
        resource.prlimit(victim.pid, resource.RLIMIT_AS, (_address_space(victim), limits[victim.pid][1]))
    stage.broken(f"{' and '.join(victim.name for victim in victims)} get no more memory (RLIMIT_AS)")
    await stage.hold(HOLD_S)
    died = [victim for victim in victims if not victim.running]
    for victim in victims:
        if victim in died:
            victim.start()
        else:
            resource.prlimit(victim.pid, resource.RLIMIT_AS, limits[victim.pid])
    stage.healed(f"there is memory again; {', '.join(victim.name for victim in died) or 'nobody'} had died of it")


def _address_space(program: Victim) -> int:
    """Bytes it has now."""
    pages = int(Path(f"/proc/{program.pid}/statm").read_text().split()[0])
    return pages * resource.getpagesize()


FAULTS = (Fault("memory", "an engine and a gateway run out of memory", memory, outside=memory),)
