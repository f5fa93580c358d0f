"""A network that is cut or slow between the gateways and one engine."""

from __future__ import annotations

from penstock.fleet.drills.run import Fault, Stage
from penstock.fleet.drills.throwaway import ThrowAway

CUT_S = 10.0
"""Longer than `resilience.stall_s` of the fleet, so that its streams move."""
DELAY_S = 0.25
SLOW_S = 8.0


async def cut(fleet: ThrowAway, stage: Stage) -> None:
    relay = fleet.relays[0]
    relay.cut()
    stage.broken("the network between all gateways and engine-0 swallows everything")
    await stage.hold(CUT_S)
    relay.mend()
    stage.healed("the network is whole again")


async def delay(fleet: ThrowAway, stage: Stage) -> None:
    for relay in fleet.relays:
        relay.delay_s = DELAY_S
    stage.broken(f"{DELAY_S * 1000:.0f} ms more each way between gateways and engines")
    await stage.hold(SLOW_S)
    for relay in fleet.relays:
        relay.delay_s = 0.0
    stage.healed("the network is fast again")


FAULTS = (
    Fault("network-cut", "the network to an engine is cut", cut),
    Fault("network-delay", "the network between gateways and engines is slow", delay),
)
