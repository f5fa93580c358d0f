"""The registered engines as gateways follow them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from penstock.config.encoders import EncoderConfig
from penstock.fleet.membership import understood
from penstock.fleet.records import EngineRecord
from penstock.fleet.registry import Fleet
from penstock.protocol.control import Replica, Topology
from penstock.protocol.versions import OLDEST_VERSION


def topology(fleet: Fleet, *, besides: str = "", models: Collection[str] = ()) -> Topology:
    """The engines that take requests, and the models of the whole fleet. `besides`: without those of this machine;
    `models`: names that are listed in any case."""
    wanted = [record for record in fleet.models.values() if record.replicas]
    replicas: dict[str, list[Replica]] = {name: [] for name in (*models, *(record.name for record in wanted))}
    loaded: dict[str, dict[str, Any]] = {record.name: understood(record.description) for record in wanted}
    encoders: dict[str, list[Replica]] = {}
    loaded_encoders: dict[str, dict[str, Any]] = {}
    for engine in sorted(fleet.engines.values(), key=lambda engine: engine.id):
        if engine.encoder:
            loaded_encoders.setdefault(engine.model, understood(engine.description, EncoderConfig))
            found = encoders.setdefault(engine.model, [])
            found += [replica(engine)] if takes_requests(engine) else []
            continue
        if engine.description:
            loaded.setdefault(engine.model, understood(engine.description))
        if engine.machine != besides and takes_requests(engine):
            replicas.setdefault(engine.model, []).append(replica(engine))
    return Topology(replicas, loaded, encoders=encoders, loaded_encoders=loaded_encoders)


def takes_requests(engine: EngineRecord) -> bool:
    return engine.state == "ready" and engine.protocol >= OLDEST_VERSION


def replica(engine: EngineRecord) -> Replica:
    """Its name is unique over all machines."""
    return Replica(
        f"{engine.machine}.{engine.replica}",
        engine.endpoint,
        engine.public_key,
        engine.machine,
        engine.pool,
        engine.region,
        engine.zone,
    )
