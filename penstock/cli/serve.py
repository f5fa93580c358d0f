"""`penstock serve`: gateways and engines on this machine, under one supervisor."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from penstock.cli.options import (
    ConfigFile,
    Device,
    Devices,
    ExpertParallel,
    LogLevel,
    PipelineParallel,
    Settings,
    TensorParallel,
    Workers,
)


class _Cluster(StrEnum):
    ray = "ray"


def serve(
    model: Annotated[
        list[str] | None,
        typer.Argument(help="Models from the configuration, or sources; by default all models of the configuration."),
    ] = None,
    config_file: ConfigFile = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", help="Port to listen on.")] = None,
    workers: Workers = None,
    device: Device = None,
    tensor_parallel: TensorParallel = None,
    pipeline_parallel: PipelineParallel = None,
    devices: Devices = None,
    expert_parallel: ExpertParallel = None,
    max_model_len: Annotated[int | None, typer.Option(help="Context window in tokens, for every model.")] = None,
    log_level: LogLevel = None,
    settings: Settings = None,
    cluster: Annotated[
        _Cluster | None, typer.Option(help="Place gateways and engines on a cluster instead of this machine.")
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Ray cluster: auto, HOST:PORT of its head node, or ray://HOST:PORT."),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="On a cluster: return when the server is ready, and leave it running.")
    ] = False,
) -> None:
    """
    Serve models on this machine: gateways and one engine process per model, restarted when they die.

    The first run downloads the model. Ctrl-C finishes running requests, then stops; a second Ctrl-C stops at once.

    Examples:

        penstock serve

        penstock serve --port 9000 --device cpu --workers 2

        penstock serve hf:org/name ./folder-with-a-checkpoint

        penstock serve hf:org/large --tensor-parallel 4

        penstock serve -c penstock.yaml --set server.drain_s=5

        penstock serve -c penstock.yaml --cluster ray

        penstock serve -c penstock.yaml --cluster ray --ray-address 10.0.0.1:6379 --detach

        penstock serve --set fleet.url=redis://redis.lan:6379 --set fleet.secret_file=fleet.secret
    """
    import asyncio
    from pathlib import Path

    from penstock.cli.terminal import flags, resolve_drafts, resolve_models, stderr
    from penstock.cli.terminal_reporter import TerminalReporter
    from penstock.config import load
    from penstock.errors import ConfigError, require_extra
    from penstock.gateway.http.port import check_port
    from penstock.identity.exposure import check_exposure
    from penstock.supervisor import early_engine
    from penstock.supervisor.autoscaler import ReplicaAutoscaler
    from penstock.supervisor.catalogue import ModelCatalogue
    from penstock.supervisor.control import ControlServer
    from penstock.supervisor.launch import resolved, units, worker_coordinator
    from penstock.supervisor.replicas import Replicas
    from penstock.supervisor.runtime import RuntimeFolder
    from penstock.supervisor.saved_models import SavedModels
    from penstock.supervisor.supervisor import Supervisor, spawn_child, spawn_first

    config = load(
        config_file,
        models=model or (),
        flags=flags(
            settings,
            server__host=host,
            server__port=port,
            server__workers=workers,
            models__each__device=device,
            models__each__tensor_parallel=tensor_parallel,
            models__each__pipeline_parallel=pipeline_parallel,
            models__each__devices=None if devices is None else f"[{devices}]",
            models__each__expert_parallel=expert_parallel,
            models__each__max_model_len=max_model_len,
            logging__level=log_level,
            cluster__kind=None if cluster is None else cluster.value,
            cluster__address=ray_address,
        ),
    )
    if config.cluster.kind == "ray":
        from penstock.cli.serve_ray import serve_ray

        early_engine.dismiss()
        serve_ray(config, detach=detach)
        return
    if ray_address is not None or detach:
        raise ConfigError("--ray-address and --detach need --cluster ray")
    if config.models:
        require_extra("engine", "`penstock serve` with models of its own")
    early = early_engine.begun()
    if config.fleet.url or not config.models:
        early_engine.dismiss()
    server = config.server
    check_port(server.host, server.port)
    if server.admin_port is not None:
        check_port(server.admin_host, server.admin_port)
    keys = False
    for host in [server.host] if server.admin_port is None else [server.host, server.admin_host]:
        keys = asyncio.run(check_exposure(host, config.store.url))
    console = stderr()
    originals = config.models
    config = resolve_drafts(resolved(config, resolve_models(config, console)), console)
    if config.fleet.url:
        from penstock.fleet.machine_process import MachineRole, run_machine
        from penstock.telemetry import logging as telemetry_logging

        telemetry_logging.configure(config.logging.format, config.logging.level)
        reporter = TerminalReporter(console, config, keys=keys)
        with RuntimeFolder() as folder:
            asyncio.run(run_machine(config, originals, folder, MachineRole(server.max_engines, serves=True), reporter))
        return

    async def run(folder: RuntimeFolder) -> None:
        engines, gateways = units(config, folder)
        reporter = TerminalReporter(console, config, keys=keys)
        async with worker_coordinator(config, folder) as gateways_up:
            supervisor = Supervisor(
                engines=engines,
                gateways=gateways,
                host=server.host,
                port=server.port,
                drain_s=server.drain_s,
                drain_delay_s=server.drain_delay_s,
                reporter=reporter,
                frozen_s=config.resilience.frozen_s,
                gateways_up=gateways_up,
                spawn=spawn_child if early is None else spawn_first(early, engines),
            )
            catalogue = ModelCatalogue(config, folder)
            saved = SavedModels(Path(server.loaded_models) if server.loaded_models else None)
            replicas = Replicas(supervisor, engines, catalogue.unit, catalogue, saved, server.max_engines)
            autoscaler = ReplicaAutoscaler(replicas, lambda: catalogue.autoscaled, reporter=reporter)
            async with ControlServer(folder.control, replicas, autoscaler):
                await supervisor.run()

    with RuntimeFolder() as folder:
        asyncio.run(run(folder))
