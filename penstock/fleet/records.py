"""What the machines of a fleet tell each other through the registry.

A record is kept alive by the process that published it: it is gone `fleet.lease_s` after that process was last heard
of. `ModelRecord` and `Assignment` are the fleet's wishes, not a process's: they stay until they are withdrawn.
Fields that a reader does not know are ignored and new fields have defaults, so neighbouring versions understand each
other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from penstock.config.variants import PLAIN, Variant
from penstock.protocol.control import Loads, ModelScaling
from penstock.protocol.versions import PROTOCOL_VERSION

VARIANTS = "variants"
"""What a machine understands that can run replicas of certain variants, and change the settings of running ones."""


class VariantCount(msgspec.Struct, frozen=True):
    """Replicas of one variant of a model."""

    model: str
    variant: Variant
    count: int


Replicas: TypeAlias = Mapping[tuple[str, Variant], int]
"""Counts by model and variant."""


def plain_counts(replicas: Replicas) -> dict[str, int]:
    """Of models whose replicas do not differ."""
    return {model: count for (model, variant), count in replicas.items() if variant == PLAIN and count}


def varied_counts(replicas: Replicas) -> list[VariantCount]:
    """Of the others."""
    return [VariantCount(*key, count) for key, count in sorted(replicas.items()) if key[1] != PLAIN and count]


def together(plain: Mapping[str, int], varied: Iterable[VariantCount]) -> dict[tuple[str, Variant], int]:
    """The counts that `plain_counts` and `varied_counts` have split."""
    found = {(model, PLAIN): count for model, count in plain.items()}
    return found | {(one.model, one.variant): one.count for one in varied}


class EngineRecord(msgspec.Struct, frozen=True, tag="engine", kw_only=True):
    """One engine process."""

    lasting: ClassVar[bool] = False

    machine: str
    model: str
    replica: str
    """Number or name of it on its machine."""
    endpoint: str
    public_key: str = ""
    """CURVE key; empty on loopback only."""
    state: Literal["starting", "ready", "draining"] = "ready"
    role: str = "both"
    pool: str = ""
    variant: Variant = PLAIN
    """How it differs from other replicas; also its pool."""
    revision: str = ""
    """Of the settings that it was started with; empty: nobody but its owner changes them."""
    region: str = ""
    zone: str = ""
    protocol: int = PROTOCOL_VERSION
    version: str = ""
    """Of Penstock."""
    encoder: bool = False
    max_running: int = 0
    context_window: int = 0
    device: str = ""
    memory: int = 0
    """Bytes of its weights and KV cache on one device; 0: not known."""
    startup_s: float = 0.0
    """Seconds from its start until it was ready."""
    description: dict[str, Any] = {}
    """The model as in the configuration (`check_model`), with its source as the user gave it, so that a gateway that
    was not configured with the model can serve it."""

    @property
    def id(self) -> str:
        return f"{self.machine}/{self.model}/{self.replica}"


class GatewayRecord(msgspec.Struct, frozen=True, tag="gateway", kw_only=True):
    """One gateway: a port that clients use, with one or several workers."""

    lasting: ClassVar[bool] = False

    machine: str
    url: str
    """Where clients and balancers reach it."""
    worker: int = 0
    state: Literal["starting", "ready", "draining"] = "ready"
    region: str = ""
    zone: str = ""
    version: str = ""

    @property
    def id(self) -> str:
        return f"{self.machine}/{self.url}/{self.worker}"


class LoadRecord(msgspec.Struct, frozen=True, tag="load", kw_only=True):
    """What a gateway sees of the load of each model."""

    lasting: ClassVar[bool] = False

    gateway: str
    """Id of its `GatewayRecord`."""
    loads: Loads

    @property
    def id(self) -> str:
        return self.gateway


class Device(msgspec.Struct, frozen=True):
    """A GPU of a machine."""

    name: str
    memory: int
    """Bytes."""


class MachineRecord(msgspec.Struct, frozen=True, tag="machine", kw_only=True):
    """A machine that runs engines for the fleet."""

    lasting: ClassVar[bool] = False

    name: str
    address: str
    cpus: int = 0
    memory: int = 0
    """Bytes."""
    devices: list[Device] = []
    labels: list[str] = []
    region: str = ""
    zone: str = ""
    room: int = 0
    """How many engines it can hold."""
    pinned: bool = False
    """What it runs was said on the machine itself; the controller leaves it alone."""
    state: Literal["ready", "leaving"] = "ready"
    leaves_at: float | None = None
    """Unix time at which a leaving machine will be gone, when it is known."""
    version: str = ""
    understands: list[str] = []
    """What older versions do not; see `VARIANTS`."""
    busy: float = 0.0
    """How much of its processors or GPUs is in use, 0 to 1; coarse."""
    running: dict[str, int] = {}
    """Replicas that it runs, by model; without those in `variants`."""
    variants: list[VariantCount] = []
    problems: dict[str, str] = {}
    """Slots (`config.variants.slot`) that it cannot run, and why."""

    @property
    def id(self) -> str:
        return self.name

    @property
    def replicas(self) -> dict[tuple[str, Variant], int]:
        """What it runs."""
        return together(self.running, self.variants)


class PoolWish(msgspec.Struct, frozen=True):
    """How many replicas a pool should have; what is None is as in the description."""

    replicas: int | None = None
    min: int | None = None
    max: int | None = None


class ModelRecord(msgspec.Struct, frozen=True, tag="model", kw_only=True):
    """A model that the fleet should serve."""

    lasting: ClassVar[bool] = True

    name: str
    description: dict[str, Any]
    replicas: int = 1
    """How many should run, all machines together; with `autoscale` in the description, where it begins. 0: none, the
    model is being unloaded."""
    min: int | None = None
    """Limits of automatic scaling in place of those in the description."""
    max: int | None = None
    pools: dict[str, PoolWish] = {}
    """What was scaled since, by pool."""

    @property
    def id(self) -> str:
        return self.name


class Assignment(msgspec.Struct, frozen=True, tag="assignment", kw_only=True):
    """What the controller wants a machine to run."""

    lasting: ClassVar[bool] = True

    machine: str
    models: dict[str, int]
    """Replicas by model; without those in `variants`."""
    variants: list[VariantCount] = []
    revisions: dict[str, str] = {}
    """Models of which the machine may replace running replicas by some with newer settings, and which settings
    (`config.variants.whole_revision`)."""
    term: int = 0
    """Of the controller that wrote it."""

    @property
    def id(self) -> str:
        return self.machine

    @property
    def replicas(self) -> dict[tuple[str, Variant], int]:
        return together(self.models, self.variants)


class CommandRecord(msgspec.Struct, frozen=True, tag="command", kw_only=True):
    """Something that a machine should do now. Whoever wants it withdraws it after the outcome."""

    lasting: ClassVar[bool] = False

    id: str
    machine: str
    verb: Literal["restart", "drain", "leave"]
    """Restart or drain a replica (drained, it stays stopped until it is restarted), or leave the fleet."""
    model: str = ""
    replica: str = ""
    """Its number on the machine; empty: all of the model, one after the other."""
    seconds: float | None = None
    """When a leaving machine will be gone."""
    at: float = 0.0
    """Unix time of the wish: a copy that is put back into the registry later is not carried out."""


class OutcomeRecord(msgspec.Struct, frozen=True, tag="outcome", kw_only=True):
    """A machine has carried out a command, or could not; it stays as long as the command."""

    lasting: ClassVar[bool] = False

    id: str
    """That of the command."""
    error: str = ""


class DecisionRecord(msgspec.Struct, frozen=True, tag="decision", kw_only=True):
    """What the controller decided last."""

    lasting: ClassVar[bool] = False

    controller: str
    scaling: dict[str, ModelScaling] = {}
    """Models that are scaled automatically."""
    wanted: dict[str, int] = {}
    """How many replicas every model should have."""
    problems: dict[str, str] = {}
    """Models that have fewer replicas than that, and why."""
    rollouts: dict[str, str] = {}
    """Models whose replicas are being replaced by some with newer settings: how far that is."""
    moves: list[str] = []
    """Replicas that are being moved to another machine."""

    @property
    def id(self) -> str:
        return self.controller


Record: TypeAlias = (
    EngineRecord
    | GatewayRecord
    | LoadRecord
    | MachineRecord
    | ModelRecord
    | Assignment
    | CommandRecord
    | OutcomeRecord
    | DecisionRecord
)

decode = msgspec.json.Decoder(Record).decode
encode = msgspec.json.Encoder().encode


def key(record: Record) -> str:
    """Unique over all records of a fleet."""
    return f"{record.__struct_config__.tag}:{record.id}"
