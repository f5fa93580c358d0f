"""What the registry holds, as operators see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from penstock.fleet.registry import Fleet
from penstock.protocol.fleet_state import FleetEngine, FleetGateway, FleetModel, FleetState, MachineState


def fleet_state(name: str, fleet: Fleet) -> FleetState:
    running = Counter(engine.machine for engine in fleet.engines.values())
    ready = Counter(engine.model for engine in fleet.engines.values() if engine.state == "ready")
    decision = fleet.decisions.get(fleet.controller)
    return FleetState(
        name=name,
        controller=fleet.controller,
        term=fleet.term,
        machines=[
            MachineState(
                name=one.name,
                state=one.state,
                controller=one.name == fleet.controller,
                address=one.address,
                region=one.region,
                zone=one.zone,
                labels=list(one.labels),
                cpus=one.cpus,
                memory=one.memory,
                devices=[device.name for device in one.devices],
                engines=running[one.name],
                room=one.room,
                busy=one.busy,
                pinned=one.pinned,
                problems=dict(one.problems),
                version=one.version,
            )
            for _, one in sorted(fleet.machines.items())
        ],
        gateways=[
            FleetGateway(
                url=one.url,
                machine=one.machine,
                state=one.state,
                region=one.region,
                zone=one.zone,
                version=one.version,
            )
            for _, one in sorted(fleet.gateways.items())
        ],
        engines=[
            FleetEngine(
                id=f"{one.model}/{one.machine}.{one.replica}",
                machine=one.machine,
                model=one.model,
                replica=f"{one.machine}.{one.replica}",
                state=one.state,
                role=one.role,
                pool=one.pool,
                variant=str(one.variant),
                device=one.device,
                region=one.region,
                zone=one.zone,
                version=one.version,
                protocol=one.protocol,
            )
            for _, one in sorted(fleet.engines.items())
        ],
        models=[
            FleetModel(
                name=one.name,
                wanted=one.replicas if decision is None else decision.wanted.get(one.name, one.replicas),
                ready=ready[one.name],
                autoscaled=_autoscaled(one.description),
                problem="" if decision is None else decision.problems.get(one.name, ""),
                rollout="" if decision is None else decision.rollouts.get(one.name, ""),
            )
            for _, one in sorted(fleet.models.items())
        ],
        moves=[] if decision is None else list(decision.moves),
    )


def _autoscaled(description: Mapping[str, Any]) -> bool:
    return any(one.get("autoscale") is not None for one in (description, *description.get("pools", ())))
