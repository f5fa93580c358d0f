"""From a configuration to the commands of the process tree.

Children get a resolved configuration (sources are local paths, overrides are applied), so that whatever the supervisor
was told in flags or environment means the same to all of them, and after a restart too.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

from penstock.config import Config, ModelConfig, dump
from penstock.supervisor.child import STATUS_FD
from penstock.supervisor.runtime import RuntimeFolder
from penstock.supervisor.supervisor import Unit


def resolved(config: Config, paths: Mapping[str, Path]) -> Config:
    """`config` with every source replaced by the path it was resolved to (`paths`: by model name)."""
    models = tuple(dataclasses.replace(model, source=str(paths[model.name])) for model in config.models)
    return dataclasses.replace(config, models=models)


def units(config: Config, folder: RuntimeFolder) -> tuple[list[Unit], Unit]:
    """The engines, one per replica of each model and per encoder, and the gateway. `config` is resolved."""
    file = folder.path / "config.json"
    dump(config, file)
    run = [sys.executable, "-m", "penstock"]
    common = ["--resolved", str(file), "--supervised", STATUS_FD]
    engines = []
    gateway = [*run, "gateway", *common]
    for position, model in enumerate(config.models):
        for index in range(model.replicas):
            endpoint = folder.endpoint(position, index)
            command = [*run, "engine", model.name, *common, "--endpoint", endpoint]
            if model.replica_devices:
                command += ["--device", model.replica_devices[index % len(model.replica_devices)]]
            engines.append(Unit(engine_name(model, index), command))
            gateway += ["--engine", f"{model.name}={endpoint}"]
    for position, encoder in enumerate(config.encoders, start=len(config.models)):
        endpoint = folder.endpoint(position, 0)
        command = [*run, "engine", encoder.name, *common, "--endpoint", endpoint]
        engines.append(Unit(f"encoder {encoder.name}", command, optional=True, early=encoder.start == "now"))
        gateway += ["--engine", f"{encoder.name}={endpoint}"]
    return engines, Unit("gateway", gateway)


def engine_name(model: ModelConfig, index: int) -> str:
    """What logs call a replica's process."""
    return f"engine {model.name}" if model.replicas == 1 else f"engine {model.name}/{index}"
