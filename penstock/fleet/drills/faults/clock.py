"""Clocks that jump: an hour ahead on one gateway and the engines, then an hour back."""

from __future__ import annotations

from penstock.fleet.drills.run import Fault, Stage
from penstock.fleet.drills.throwaway import ThrowAway

JUMP_S = 3600.0
HOLD_S = 4.0
_KINDS = ("gateway-0", "engines")


async def clock(fleet: ThrowAway, stage: Stage) -> None:
    """The other gateway and the database keep the right time, so that machines disagree."""
    assert fleet.shim is not None
    for ahead in (JUMP_S, -JUMP_S):
        for kind in _KINDS:
            fleet.shim.set(kind, clock_s=ahead)
        stage.broken(f"the clocks of gateway-0 and of all engines jump by {ahead / 3600:+.0f} h")
        await stage.hold(HOLD_S)
    for kind in _KINDS:
        fleet.shim.set(kind)
    stage.healed("all clocks are right again")


FAULTS = (Fault("clock", "clocks jump by an hour, ahead and back", clock),)
