"""Builds the commands of the process tree from a configuration.

Children get a resolved configuration: sources are local paths, flags and environment are applied. So the supervisor's
settings mean the same to all of them, also after a restart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from penstock.config import Config, ModelConfig, dump
from penstock.config.variants import Variant, variant_at
from penstock.errors import ConfigError
from penstock.gateway.workers.coordinator import WorkerCoordinator
from penstock.interpreter import module
from penstock.routing.place import ReplicaPlace, labelled_endpoint
from penstock.supervisor.child import STATUS_FD
from penstock.supervisor.runtime import RuntimeFolder
from penstock.supervisor.unit import Unit


class Site(Protocol):
    """Where the engines of a machine listen, and on which devices they run, when other machines use them too."""

    def endpoints(self) -> tuple[str, str]:
        """Where the next engine listens, and where others reach it."""

    def device(self, model: ModelConfig) -> str | None:
        """The device of the next engine, a replica of this variant of the model; None: as configured."""

    def started(self, unit: Unit) -> None:
        """The engine that uses them."""


def resolved(config: Config, paths: Mapping[str, Path]) -> Config:
    """`config` with every source replaced by its local path (`paths`: by model name)."""
    models = tuple(dataclasses.replace(model, source=str(paths[model.name])) for model in config.models)
    return dataclasses.replace(config, models=models)


def units(config: Config, folder: RuntimeFolder) -> tuple[list[Unit], list[Unit]]:
    """The engines (one per replica of each model and one per encoder) and the gateways. `config` must be resolved."""
    engines = []
    endpoints: dict[str, list[str]] = {}
    for model in config.models:
        if model.pools and not model.first_replicas:
            raise ConfigError(f"`{model.name}`: no pool has a replica; set replicas of at least one of its pools")
        replicas = [replica(config, folder, model.name, index) for index in range(model.first_replicas)]
        endpoints[model.name] = [
            labelled_endpoint(unit.endpoint, ReplicaPlace(unit.pool, config.fleet.region, config.fleet.zone))
            for unit in replicas
        ]
        engines += replicas
    found, more = encoders(config, folder)
    return engines + found, gateways(config, folder, endpoints | more, ["--control", str(folder.control)])


def encoders(config: Config, folder: RuntimeFolder) -> tuple[list[Unit], dict[str, list[str]]]:
    """The engines of the encoders, and their endpoints by name."""
    engines, endpoints = [], {}
    for position, encoder in enumerate(config.encoders, start=len(config.models)):
        endpoint = folder.endpoint(position, 0)
        endpoints[encoder.name] = [endpoint]
        command = [*_run("engine", config, folder), encoder.name, "--endpoint", endpoint]
        engines.append(Unit(f"encoder {encoder.name}", command, optional=True, autostart=encoder.start == "now"))
    return engines, endpoints


def replica(
    config: Config,
    folder: RuntimeFolder,
    name: str,
    index: int,
    place: int | None = None,
    site: Site | None = None,
    variant: Variant | None = None,
) -> Unit:
    """The engine process of replica `index` of a model. `place`: for a model loaded at run time, which has a `config`
    of its own, the number that keeps its endpoints and files apart. `site`: for engines that other machines use.
    `variant`: if not the one of that number."""
    position, whole = next((place, model) for place, model in enumerate(config.models) if model.name == name)
    variant = variant_at(whole, index) if variant is None else variant
    model = variant.of(whole)
    endpoint = listen = folder.endpoint(position if place is None else place, index)
    device = variant.device or None
    if site is not None:
        listen, endpoint = site.endpoints()
        device = site.device(model)
    command = [*_run("engine", config, folder, place), model.name, "--endpoint", listen]
    if variant.pool:
        command += ["--pool", variant.pool]
    if device is not None:
        command += ["--device", device]
    if variant.grid:
        command += ["--tensor-parallel", str(model.tensor_parallel)]
        command += ["--pipeline-parallel", str(model.pipeline_parallel)]
    if model.placement is not None:
        command += ["--join-endpoint", model.placement.endpoint(index)]
    if variant.role:
        command += ["--role", variant.role]
    unit = Unit(
        engine_name(whole, index), command, model=model.name, replica=str(index), endpoint=endpoint, variant=variant,
        save_s=model.save_s,
    )  # fmt: skip
    if site is not None:
        site.started(unit)
    return unit


def engine_name(model: ModelConfig, index: int) -> str:
    """The name of a replica's process in logs."""
    return f"engine {model.name}/{index}" if index or model.replica_count > 1 else f"engine {model.name}"


def gateways(
    config: Config, folder: RuntimeFolder, endpoints: Mapping[str, Sequence[str]], options: Sequence[str] = ()
) -> list[Unit]:
    """The gateway, or the workers that share the port; `options`: further arguments for each."""
    command = [*_run("gateway", config, folder), *options]
    for name, found in endpoints.items():
        for endpoint in found:
            command += ["--engine", f"{name}={endpoint}"]
    if config.server.workers == 1:
        return [Unit("gateway", command)]
    worker = ["--desk", str(folder.coordinator), "--worker"]
    return [Unit(f"gateway {number}", [*command, *worker, str(number)]) for number in range(config.server.workers)]


@asynccontextmanager
async def worker_coordinator(config: Config, folder: RuntimeFolder) -> AsyncIterator[Callable[[], bool]]:
    """Runs the coordinator of several gateway workers; yields a function that says whether all have joined. A single
    gateway needs none."""
    if config.server.workers == 1:
        yield lambda: True
        return
    async with WorkerCoordinator(folder.coordinator) as found:
        yield lambda: found.workers == config.server.workers


def _run(command: str, config: Config, folder: RuntimeFolder, place: int | None = None) -> list[str]:
    file = folder.path / ("config.json" if place is None else f"config-{place}.json")
    dump(config, file)
    return module("penstock", command, "--resolved", str(file), "--supervised", STATUS_FD)
