"""What gateways and their supervisor say to each other about replicas: JSON lines over a Unix socket.

    gateway                              supervisor
    (connects)       ◄──────────────────  Topology   at once, and whenever it changes
    Scale, Restart, Drain, Stop ────────►
                     ◄──────────────────  Done       one per operation, when it is over

The socket lies in the server's runtime folder, which only its user may enter; what a gateway passes on from HTTP has
been asked for with an admin key.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Replica(msgspec.Struct, frozen=True):
    """An engine that should be running, and where it listens."""

    name: str
    endpoint: str


class Topology(msgspec.Struct, frozen=True, tag="topology"):
    """The replicas of every model."""

    models: dict[str, list[Replica]]


class Scale(msgspec.Struct, frozen=True, tag="scale"):
    """Run so many replicas of a model. Over when those that are new are ready, and those that are too many are gone."""

    operation: int
    model: str
    replicas: int


class Restart(msgspec.Struct, frozen=True, tag="restart"):
    """Drain and start again, one after the other: all replicas of a model, or one."""

    operation: int
    model: str
    replica: str = ""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Let a replica finish what it runs and end; it stays away until it is restarted."""

    operation: int
    model: str
    replica: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Drain the whole server and end it."""

    operation: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """An operation is over; `error` says why it could not be done."""

    operation: int
    error: str = ""


Operation: TypeAlias = Scale | Restart | Drain | Stop
FromSupervisor: TypeAlias = Topology | Done

decode_operation = msgspec.json.Decoder(Operation).decode
decode_from_supervisor = msgspec.json.Decoder(FromSupervisor).decode
_encoder = msgspec.json.Encoder()


def line(message: Operation | FromSupervisor) -> bytes:
    return _encoder.encode(message) + b"\n"
