"""The messages between gateways and their supervisor about replicas: JSON lines over a Unix socket.

    gateway                              supervisor
    (connects)       ◄──────────────────  Topology   at once, and whenever it changes
    Following        ──────────────────►            one per topology: which models this gateway cannot serve
    Scale, Restart, Drain, Stop, LoadModel, UnloadModel ─►
                     ◄──────────────────  Loading    while a model is being loaded
                     ◄──────────────────  Done       one per operation, when it is over

The socket is in the server's runtime folder, which only its user may enter; what a gateway passes on from HTTP was
authorized with an admin key.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec


class Replica(msgspec.Struct, frozen=True):
    """An engine that should be running, and where it listens."""

    name: str
    endpoint: str


class Topology(msgspec.Struct, frozen=True, tag="topology"):
    """The replicas of every model. `loaded`: the configurations of models that were added while the server ran."""

    models: dict[str, list[Replica]]
    loaded: dict[str, dict[str, Any]] = {}
    number: int = 0
    """Grows with every change."""


class Following(msgspec.Struct, frozen=True, tag="following"):
    """A gateway has taken over a topology; `problems`: the models that it cannot serve, and why."""

    number: int
    problems: dict[str, str] = {}


class Scale(msgspec.Struct, frozen=True, tag="scale"):
    """Run this many replicas of a model. Done when new ones are ready and surplus ones have stopped."""

    operation: int
    model: str
    replicas: int


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


Operation: TypeAlias = Scale | Restart | Drain | Stop | LoadModel | UnloadModel
FromSupervisor: TypeAlias = Topology | Loading | Done

FromGateway: TypeAlias = Operation | Following

decode_from_gateway = msgspec.json.Decoder(FromGateway).decode
decode_from_supervisor = msgspec.json.Decoder(FromSupervisor).decode
_encoder = msgspec.json.Encoder()


def line(message: FromGateway | FromSupervisor) -> bytes:
    return _encoder.encode(message) + b"\n"
