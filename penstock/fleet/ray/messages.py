"""What the driver, the controller and the hosts tell each other. They travel as bytes in the arguments and results of
actor calls, which Ray neither logs nor lists, unlike environment variables and names."""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import msgspec

from penstock.engine.request import EngineInfo
from penstock.supervisor.status import Status

T = TypeVar("T")


class Order(msgspec.Struct, frozen=True):
    """What a host should run."""

    config: dict[str, Any]
    """The whole configuration, as `dataclasses.asdict` makes it."""
    secret: list[str]
    """The fleet secret, newest first."""
    model: str = ""
    """For an engine: its model, and further arguments."""
    arguments: list[str] = []


class Place(msgspec.Struct, frozen=True):
    """Where a host is."""

    node: str
    """Ray's id of the node."""
    name: str
    address: str
    version: str
    """Of Penstock."""


class Line(msgspec.Struct, frozen=True, tag="line"):
    """A process wrote a line."""

    text: str


class Told(msgspec.Struct, frozen=True, tag="status"):
    """A process reports its status."""

    status: Status


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The process of a host has ended; nothing follows."""

    code: int
    how: str


HostEvent: TypeAlias = Line | Told | Ended


class HostEvents(msgspec.Struct, frozen=True):
    """What has happened in a host, from event number `first` on. They are kept until the next call acknowledges them,
    so that nothing is lost with a connection."""

    first: int
    events: list[HostEvent]


class Printed(msgspec.Struct, frozen=True, tag="printed"):
    child: str
    text: str


class Progressed(msgspec.Struct, frozen=True, tag="progress"):
    child: str
    phase: str
    fraction: float


class EngineStarted(msgspec.Struct, frozen=True, tag="engine"):
    child: str
    info: EngineInfo


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    engines: list[EngineInfo]
    seconds: float
    urls: list[str]
    """Of the gateways."""


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    child: str
    how: str
    restart_in_s: float


class Scaled(msgspec.Struct, frozen=True, tag="scaled"):
    model: str
    before: int
    after: int
    why: str


class Draining(msgspec.Struct, frozen=True, tag="draining"):
    limit_s: float


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """Everything has ended; `problem`: why the server could not start."""

    problem: str = ""


Event: TypeAlias = Printed | Progressed | EngineStarted | Ready | Exited | Scaled | Draining | Stopped


class Journal(msgspec.Struct, frozen=True):
    """Events of the controller from some number on."""

    next: int
    events: list[Event]


class PlacedProcess(msgspec.Struct, frozen=True):
    """A gateway or a replica, and where it is; no node: it waits for room."""

    name: str
    kind: str
    model: str = ""
    replica: str = ""
    endpoint: str = ""
    node: str = ""
    machine: str = ""
    ready: bool = False


class ServerState(msgspec.Struct, frozen=True):
    """What the controller runs."""

    version: str
    detached: bool
    stopping: bool
    processes: list[PlacedProcess]


def encode(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(kind: type[T], data: bytes) -> T:
    return msgspec.msgpack.decode(data, type=kind)
