"""Processes that are killed: an engine, a gateway, a supervisor, a whole machine."""

from __future__ import annotations

from penstock.fleet.drills.run import Fault, Stage
from penstock.fleet.drills.target import Target
from penstock.fleet.drills.throwaway import ThrowAway

DOWN_S = 2.0
"""How long it takes whoever restarts it: systemd, Kubernetes, a person."""


async def engine(fleet: Target, stage: Stage) -> None:
    victim = fleet.engine_victims[0]
    victim.kill()
    stage.broken(f"{victim.name} killed (SIGKILL)")
    await stage.hold(DOWN_S)
    victim.start()
    stage.healed(f"{victim.name} started again")


async def gateway(fleet: Target, stage: Stage) -> None:
    victim = fleet.gateway_victims[0]
    victim.kill()
    stage.broken(f"{victim.name} killed (SIGKILL)")
    await stage.hold(DOWN_S)
    victim.start()
    stage.healed(f"{victim.name} started again")


async def supervisor(fleet: ThrowAway, stage: Stage) -> None:
    victim = fleet.machines[0]
    victim.kill()
    stage.broken(f"the supervisor of {victim.name} killed (SIGKILL); its gateway and engine end with it")
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
