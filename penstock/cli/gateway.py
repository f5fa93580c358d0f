"""`penstock gateway`: one gateway process in front of engines that already run."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.options import ConfigFile, LogLevel, Resolved, Settings, Supervised


def gateway(
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine", "-e", metavar="MODEL=ENDPOINT", help="Where a model's engine listens; may be repeated."
        ),
    ] = None,
    config_file: ConfigFile = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", help="Port to listen on.")] = None,
    log_level: LogLevel = None,
    settings: Settings = None,
    resolved: Resolved = None,
    supervised: Supervised = None,
) -> None:
    """
    Run one gateway: HTTP in front of engines started with `penstock engine`.

    `penstock serve` does both.

    Examples:

        penstock gateway --engine smollm2-135m=tcp://127.0.0.1:5555

        penstock gateway -e small=ipc:///run/small -e large=ipc:///run/large -c penstock.yaml --port 9000
    """
    from penstock.cli.console import flags, resolve_models, stderr
    from penstock.config import load, load_resolved
    from penstock.errors import PenstockError
    from penstock.supervisor.launch import resolved as with_paths
    from penstock.supervisor.lifeline import Failed, StatusPipe, die_with_supervisor

    if supervised is not None:
        die_with_supervisor()
    try:
        endpoints = _endpoints(engine or [])
        if resolved is not None:
            config = load_resolved(resolved)
        else:
            given = flags(settings, server__host=host, server__port=port, logging__level=log_level)
            config = load(config_file, models=list(endpoints), flags=given)
            config = with_paths(config, resolve_models(config, stderr()))
        from penstock.gateway.main import run

        run(config, endpoints)
    except PenstockError as error:
        StatusPipe(supervised).send(Failed(str(error)))
        raise


def _endpoints(engines: list[str]) -> dict[str, str]:
    from penstock.errors import ConfigError

    endpoints = {}
    for engine in engines:
        name, equals, endpoint = engine.partition("=")
        if not equals or "://" not in endpoint:
            raise ConfigError(f"--engine {engine}: write it as MODEL=ENDPOINT, for example m=tcp://127.0.0.1:5555")
        endpoints[name] = endpoint
    if not endpoints:
        raise ConfigError("--engine MODEL=ENDPOINT is needed at least once; `penstock serve` starts engines itself")
    return endpoints
