"""`penstock join redis://...`: this machine as part of a fleet."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from penstock.cli.terminal_reporter import TerminalReporter
from penstock.engine.request import EngineInfo

if TYPE_CHECKING:
    from penstock.config import Config, ModelConfig


def join_fleet(
    url: str,
    name: str | None,
    *,
    config_file: Path | None,
    settings: Sequence[str],
    secret_file: Path | None,
    advertise: str | None,
    labels: Sequence[str],
    model: str | None,
    replicas: int | None,
    engines: int | None,
) -> None:
    import asyncio
    import json

    from penstock.cli.terminal import flags, resolve_drafts, resolve_models, stderr
    from penstock.config import load
    from penstock.errors import ConfigError
    from penstock.fleet.machine_process import MachineRole, run_machine
    from penstock.fleet.machine_site import default_room
    from penstock.supervisor.launch import resolved
    from penstock.supervisor.runtime import RuntimeFolder
    from penstock.telemetry import logging as telemetry_logging

    if model is None and replicas is not None:
        raise ConfigError("--replicas needs --model: without it the fleet's controller says what runs here")
    given = flags(
        list(settings),
        fleet__url=url,
        fleet__machine=name,
        fleet__secret_file=secret_file,
        fleet__advertise=advertise,
        fleet__labels=json.dumps(list(labels)) if labels else None,
    )
    config = load(config_file, models=[] if model is None else [model], flags=given)
    telemetry_logging.configure(config.logging.format, config.logging.level)
    console = stderr()
    originals: tuple[ModelConfig, ...] = config.models
    if model is None:
        originals = ()
        config = dataclasses.replace(config, models=())
    else:
        config = resolve_drafts(resolved(config, resolve_models(config, console)), console)
    # Gateways use encoders of their own machine.
    config = dataclasses.replace(config, encoders=())
    pins = None if model is None else {one.name: replicas or 1 for one in originals}
    role = MachineRole(engines or default_room(), pins=pins)
    with RuntimeFolder() as folder:
        asyncio.run(run_machine(config, originals, folder, role, JoinReporter(console, config)))


class JoinReporter(TerminalReporter):
    """A machine without gateways has nothing to show but what it joined."""

    def _banner(self, engines: list[EngineInfo], seconds: float) -> None:
        config: Config = self._config
        text = f"This machine is part of the fleet `{config.fleet.name}` at {config.fleet.url}; Ctrl-C leaves it"
        self._console.print(Text(text, style="bold green"), soft_wrap=True)
