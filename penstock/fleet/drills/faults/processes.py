"""Processes that are killed: an engine, a gateway, a supervisor, a whole machine."""

from __future__ import annotations

from penstock.fleet.drills.run import Fault, Stage
from penstock.fleet.drills.target import Target, Victim
from penstock.fleet.drills.throwaway import ThrowAway

DOWN_S = 2.0
"""How long it takes whoever restarts it: systemd, Kubernetes, a person."""


async def engine(fleet: Target, stage: Stage) -> None:
    victim = fleet.engine_victims[0]
    await _kill(victim, stage, f"{victim.name} killed (SIGKILL)")


async def gateway(fleet: Target, stage: Stage) -> None:
    victim = fleet.gateway_victims[0]
    await _kill(victim, stage, f"{victim.name} killed (SIGKILL)")


async def supervisor(fleet: ThrowAway, stage: Stage) -> None:
    victim = fleet.machines[0]
    what = f"the supervisor of {victim.name} killed (SIGKILL); its gateway and engine end with it"
    await _kill(victim, stage, what)


async def _kill(victim: Victim, stage: Stage, what: str) -> None:
    victim.kill()
    stage.broken(what)
    await stage.hold(DOWN_S)
    victim.start()
    stage.healed(f"{victim.name} started again")


async def node(fleet: ThrowAway, stage: Stage) -> None:
    """Two of three engines, as one machine, and the gateway beside them."""
    leader, other, gateway = fleet.engines[-2], fleet.engines[-1], fleet.gateways[-1]
    leader.kill_group()
    other.kill()
    gateway.kill()
    stage.broken(f"a machine is gone: {leader.name}, {other.name} and {gateway.name} killed at once")
    await stage.hold(2 * DOWN_S)
    for program in (leader, other, gateway):
        program.start()
    stage.healed("the machine is back")


FAULTS = (
    Fault("engine", "an engine is killed", engine, outside=engine),
    Fault("gateway", "a gateway is killed", gateway, outside=gateway),
    Fault("supervisor", "the supervisor of a machine is killed", supervisor, "machines"),
    Fault("node", "a whole machine is killed", node),
)
