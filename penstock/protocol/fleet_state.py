"""The fleet as operators see it: machines, gateways, engines, models. Supervisors tell their gateways, which show it in
the API, the metrics and the console."""

from __future__ import annotations

import msgspec


class MachineState(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    state: str
    """ready, or leaving."""
    controller: bool = False
    """Whether it decides what runs where."""
    address: str = ""
    region: str = ""
    zone: str = ""
    labels: list[str] = []
    cpus: int = 0
    memory: int = 0
    devices: list[str] = []
    engines: int = 0
    room: int = 0
    """Engines that it can hold."""
    busy: float = 0.0
    """How much of its processors or GPUs is in use, 0 to 1."""
    pinned: bool = False
    problems: dict[str, str] = {}
    """Models that it could not start lately, and why."""
    version: str = ""


class FleetGateway(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    machine: str
    state: str
    region: str = ""
    zone: str = ""
    version: str = ""


class FleetEngine(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """MODEL/MACHINE.NUMBER, as in `penstock replicas`."""
    machine: str
    model: str
    replica: str
    state: str
    """starting, ready or draining."""
    role: str = ""
    pool: str = ""
    variant: str = ""
    """How it differs from other replicas of its model: pool, role, grid, device."""
    device: str = ""
    region: str = ""
    zone: str = ""
    version: str = ""
    protocol: int = 0


class FleetModel(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    wanted: int
    ready: int
    autoscaled: bool = False
    problem: str = ""
    """Why there are fewer than wanted."""
    rollout: str = ""
    """How many replicas have the settings that the model was given while it ran; empty: all."""


class FleetState(msgspec.Struct, frozen=True, kw_only=True, tag="fleet"):
    name: str
    controller: str = ""
    """Empty: nobody at the moment."""
    term: int = 0
    machines: list[MachineState] = []
    gateways: list[FleetGateway] = []
    engines: list[FleetEngine] = []
    models: list[FleetModel] = []
    moves: list[str] = []
    """Replicas that are being moved to another machine."""
