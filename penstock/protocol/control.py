"""The messages between gateways and their supervisor about replicas: JSON lines over a Unix socket.

    gateway                              supervisor
    (connects)       ◄──────────────────  Topology   at once, and whenever it changes
    Following        ──────────────────►            one per topology: which models this gateway cannot serve
    Loads            ──────────────────►            every second, for models that are scaled automatically
                     ◄──────────────────  Scaling    how many replicas they should have, and why
    Scale, SetLimits, Restart, Drain, Notice, Stop, LoadModel, UnloadModel, Leave ─►
                     ◄──────────────────  FleetState  the other machines, where there are some
                     ◄──────────────────  Loading    while a model is being loaded
                     ◄──────────────────  Done       one per operation, when it is over

The socket is in the server's runtime folder, which only its user may enter; what a gateway passes on from HTTP was
authorized with an admin key.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from penstock.protocol.fleet_state import FleetState


class Replica(msgspec.Struct, frozen=True):
    """An engine that should be running, and where it listens. On other machines of a fleet: its CURVE key, and where
    it is."""

    name: str
    endpoint: str
    public_key: str = ""
    machine: str = ""
    pool: str = ""
    region: str = ""
    zone: str = ""


class Topology(msgspec.Struct, frozen=True, tag="topology"):
    """The replicas of every model. `loaded`: the configurations of models that were added while the server ran."""

    models: dict[str, list[Replica]]
    loaded: dict[str, dict[str, Any]] = {}
    number: int = 0
    """Grows with every change."""
    encoders: dict[str, list[Replica]] = {}
    """Engines of encoders on other machines."""
    loaded_encoders: dict[str, dict[str, Any]] = {}
    """The configurations of these encoders."""


class Following(msgspec.Struct, frozen=True, tag="following"):
    """A gateway has taken over a topology; `problems`: the models that it cannot serve, and why."""

    number: int
    problems: dict[str, str] = {}


class ModelLoad(msgspec.Struct, frozen=True):
    """The load of one model as a gateway sees it. Counters only grow while the gateway lives."""

    arrived: int = 0
    """Requests that asked for the model, also those that were refused."""
    finished: int = 0
    in_flight: int = 0
    """This gateway's requests in the engines."""
    queued: int = 0
    """This gateway's requests that wait for a place or for a replica."""
    shared_queue: int = 0
    """Requests that wait in a queue which all gateways share."""
    predicted_wait_s: float = 0.0
    waiting: int = 0
    """Requests of all gateways that wait inside the engines; the rest of this describes the engines too."""
    slots: int = 0
    used_blocks: int = 0
    total_blocks: int = 0


def scaled_name(model: str, pool: str = "") -> str:
    """What automatic scaling calls a model, or a pool that is scaled on its own."""
    return f"{model}#{pool}" if pool else model


class Loads(msgspec.Struct, frozen=True, tag="loads"):
    """The load of every model and pool that is scaled automatically, by `scaled_name`."""

    models: dict[str, ModelLoad]


class ModelScaling(msgspec.Struct, frozen=True):
    """Automatic scaling of one model: its limits, where it stands, and the last decision."""

    min: int
    max: int
    desired: int
    ready: int
    starting: int
    leaving: int = 0
    """Replicas that finish their requests and stop."""
    reason: str = ""
    """Why the count last changed or would change; see `Autoscaler`."""
    detail: str = ""
    decided_at: float = 0.0
    """Unix time of the last change of `desired`."""
    spot: int = 0
    cold_start_s: float | None = None
    replica_rate: float | None = None
    """Requests per second of a busy replica, as far as known."""
    decisions: dict[str, int] = {}
    """Changes of `desired` since the start, by reason."""
    failed_starts: int = 0
    problem: str = ""
    """Why the last start failed; empty after one that did not."""
    model: str = ""
    pool: str = ""
    """What is scaled, if it is a pool."""


class Scaling(msgspec.Struct, frozen=True, tag="scaling"):
    """The state of automatic scaling, by `scaled_name`."""

    models: dict[str, ModelScaling]


class SetLimits(msgspec.Struct, frozen=True, tag="limits"):
    """Changes the limits of automatic scaling until the server stops; None keeps one."""

    operation: int
    model: str
    min: int | None = None
    max: int | None = None
    pool: str = ""


class Notice(msgspec.Struct, frozen=True, tag="notice"):
    """A replica, or with an empty name every replica of the model, will lose its machine after `seconds`. Done at once:
    replacements start, and the replica drains when they are ready or time runs short."""

    operation: int
    model: str
    replica: str
    seconds: float


class Scale(msgspec.Struct, frozen=True, tag="scale"):
    """Run this many replicas of a model, or of one of its pools. Done when new ones are ready and surplus ones have
    stopped."""

    operation: int
    model: str
    replicas: int
    pool: str = ""


class Restart(msgspec.Struct, frozen=True, tag="restart"):
    """Drain and start again, one after the other: all replicas of a model, or one."""

    operation: int
    model: str
    replica: str = ""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Let a replica finish its requests and stop; it stays stopped until it is restarted."""

    operation: int
    model: str
    replica: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Drain the whole server and stop it."""

    operation: int


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """A machine of the fleet hands its replicas over and stops; `seconds`: when it will be gone. Done when it knows."""

    operation: int
    machine: str
    seconds: float | None = None


class LoadModel(msgspec.Struct, frozen=True, tag="load"):
    """Serve one more model, described as in the configuration. Done when its engines are ready."""

    operation: int
    model: dict[str, Any]


class UnloadModel(msgspec.Struct, frozen=True, tag="unload"):
    """Stop serving a model. Done when its engines have finished their requests."""

    operation: int
    model: str


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """How far a model has loaded: the phase, and the fraction of it that is done (0..1). No phase: it has ended."""

    model: str
    phase: str = ""
    fraction: float = 0.0


class Done(msgspec.Struct, frozen=True, tag="done"):
    """An operation has ended; `error` says why it failed."""

    operation: int
    error: str = ""


Operation: TypeAlias = Scale | SetLimits | Restart | Drain | Notice | Stop | LoadModel | UnloadModel | Leave
FromSupervisor: TypeAlias = Topology | Loading | Scaling | FleetState | Done

FromGateway: TypeAlias = Operation | Following | Loads

decode_from_gateway = msgspec.json.Decoder(FromGateway).decode
decode_from_supervisor = msgspec.json.Decoder(FromSupervisor).decode
_encoder = msgspec.json.Encoder()


def line(message: FromGateway | FromSupervisor) -> bytes:
    return _encoder.encode(message) + b"\n"
