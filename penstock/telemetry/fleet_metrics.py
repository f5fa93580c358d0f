"""Metrics of a fleet, as the registry tells it; every gateway of a fleet has the same values."""

from __future__ import annotations

from collections.abc import Callable

from penstock.protocol.fleet_state import FleetState
from penstock.telemetry.exposition import MetricRegistry


def add_fleet_metrics(registry: MetricRegistry, read: Callable[[], FleetState | None]) -> None:
    """Registers the metrics; `read` returns the fleet, if the server is part of one."""

    def state() -> FleetState:
        return read() or FleetState(name="")

    registry.sampled(
        "gauge",
        "penstock_fleet_machine_engines",
        "Engines on a machine of the fleet.",
        ("machine", "zone", "state"),
        lambda: [((one.name, one.zone, one.state), one.engines) for one in state().machines],
    )
    registry.sampled(
        "gauge",
        "penstock_fleet_machine_room",
        "Engines that a machine of the fleet can hold.",
        ("machine",),
        lambda: [((one.name,), one.room) for one in state().machines],
    )
    registry.sampled(
        "gauge",
        "penstock_fleet_controller",
        "1 for the machine that decides what runs where.",
        ("machine",),
        lambda: [((one.name,), float(one.controller)) for one in state().machines],
    )
    registry.sampled(
        "gauge",
        "penstock_fleet_gateway_up",
        "1 for a gateway of the fleet that takes requests.",
        ("machine", "url"),
        lambda: [((one.machine, one.url), float(one.state == "ready")) for one in state().gateways],
    )
    registry.sampled(
        "gauge",
        "penstock_fleet_missing_replicas",
        "Replicas of a model that should be ready and are not.",
        ("model_name",),
        lambda: [((one.name,), max(one.wanted - one.ready, 0)) for one in state().models],
    )
