"""How a process of this machine takes part in a fleet: its name, its address, its connection to the registry, and how
it describes a model to others."""

from __future__ import annotations

import dataclasses
import logging
import socket
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from penstock.config.encoders import EncoderConfig
from penstock.config.fleet import FleetConfig
from penstock.config.load import check_model
from penstock.config.models import ModelConfig
from penstock.errors import ConfigError, PenstockError
from penstock.fleet.redis_registry import RedisRegistry
from penstock.protocol.address import is_loopback
from penstock.protocol.fleet_secret import FleetSecret

GATEWAY_ONLY = ("fallback", "overflow_at", "downgrade_to", "aliases", "pool_rules")

log = logging.getLogger("penstock.fleet")


async def open_registry(config: FleetConfig, secret: FleetSecret, *, required: bool = True) -> RedisRegistry:
    """A connection to the fleet's registry; `ConfigError` when this machine has another secret. `required`: it must
    answer now; otherwise it may be away, and is used as soon as it is back."""
    registry = RedisRegistry(config.url, config.name, secret, lease_s=config.lease_s)
    try:
        await registry.check()
        if required and not registry.available:
            raise PenstockError(f"fleet.url: the registry at {registry.address} does not answer: {registry.problem}")
    except BaseException:
        await registry.close()
        raise
    return registry


def machine_name(config: FleetConfig) -> str:
    name = config.machine or socket.gethostname()
    if not name or "/" in name or any(letter.isspace() for letter in name):
        raise ConfigError(f"fleet.machine: {name!r} cannot be the name of a machine: no spaces or slashes")
    return name


def own_address(config: FleetConfig) -> str:
    """The address at which other machines reach this one: as configured, or the one from which this machine reaches the
    registry (a datagram socket sends nothing to find out)."""
    if config.advertise:
        return config.advertise
    parts = urlsplit(config.url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 6379
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, kind, number)) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise PenstockError(
            f"{host}: {error.strerror}; the address of this machine is not known, set fleet.advertise"
        ) from error


def listening(config: FleetConfig) -> str:
    """The endpoint of an engine of this machine: the first free port of `fleet.ports`. An address behind a port mapping
    is not the machine's own, so it listens on all of them."""
    host = "127.0.0.1" if is_loopback(own_address(config)) else "0.0.0.0"
    return f"tcp://{host}:{config.ports}"


def advertised(config: FleetConfig, endpoint: str) -> str:
    """Where others reach an engine that listens on `endpoint`."""
    host, port = own_address(config), endpoint.rpartition(":")[2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def described(model: ModelConfig | EncoderConfig) -> dict[str, Any]:
    """A model as other machines read it: what differs from the defaults, with a folder's whole path."""
    plain, default = (msgspec.json.decode(msgspec.json.encode(each)) for each in (model, type(model)()))
    kept = {name: value for name, value in plain.items() if value != default[name]}
    source = Path(model.source).expanduser()
    return {**kept, "name": model.name, "source": str(source.absolute()) if source.exists() else model.source}


def understood(
    description: Mapping[str, Any], kind: type[ModelConfig] | type[EncoderConfig] = ModelConfig
) -> dict[str, Any]:
    """The settings of a described model that this version knows; a newer one may have others."""
    fields = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in description.items() if name in fields}


def engine_model(description: Mapping[str, Any]) -> ModelConfig:
    """A described model, as far as engines are concerned. `ConfigError` says what is wrong with it."""
    return check_model(engine_settings(description), fleet=True)


def engine_settings(description: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that this version knows without those of gateways, which may name what this machine does not know:
    other models, tiers, tenants."""
    settings = {name: value for name, value in understood(description).items() if name not in GATEWAY_ONLY}
    if pools := settings.get("pools"):
        settings["pools"] = [{key: value for key, value in pool.items() if key != "reserve"} for pool in pools]
        settings["pool_rules"] = [{"pool": pool["name"]} for pool in pools]  # each must have one
    return settings
