"""`penstock gateway`: one gateway process, or several on one port, for engines that already run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import ConfigFile, FleetUrl, LogLevel, Resolved, Settings, Supervised, Workers

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.gateway.process.supervisor_link import Follow, Link, Scaled
    from penstock.protocol.fleet_secret import FleetSecret
    from penstock.protocol.transport import CurveClient


def gateway(
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            "-e",
            metavar="MODEL=ENDPOINT",
            help="Endpoint of an engine or encoder; repeat it for more models and for replicas. Its place may follow: "
            "?pool=NAME&region=NAME.",
        ),
    ] = None,
    config_file: ConfigFile = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", help="Port to listen on.")] = None,
    workers: Workers = None,
    fleet: FleetUrl = None,
    log_level: LogLevel = None,
    settings: Settings = None,
    curve_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CURVE secret key of this gateway, for encrypted engines.")
    ] = None,
    curve_engines: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CURVE public keys of the engines: lines of MODEL and key.")
    ] = None,
    control: Annotated[Path | None, typer.Option(hidden=True, help="Socket of the supervisor.")] = None,
    resolved: Resolved = None,
    supervised: Supervised = None,
    coordinator: Annotated[
        Path | None, typer.Option("--desk", hidden=True, help="Socket of the coordinator of this port's workers.")
    ] = None,
    worker: Annotated[int, typer.Option(hidden=True, help="Number of this worker.")] = 0,
) -> None:
    """
    Run a gateway: the HTTP server for engines started with `penstock engine`.

    `penstock serve` starts both. In a fleet (`--fleet`, `fleet.url`) no engine needs to be named: the gateway serves
    every engine that registers, whatever machine it is on.

    Examples:

        penstock gateway --engine smollm2-135m=tcp://127.0.0.1:5555

        penstock gateway -e smollm2-135m=tcp://127.0.0.1:5555 --workers 2

        penstock gateway --fleet redis://redis.lan --set fleet.secret_file=fleet.secret

        penstock gateway -e m=tcp://engine.lan:5555 --curve-key gateway.key --curve-engines engines.txt

        penstock gateway -e m=tcp://127.0.0.1:5555 -e m=tcp://127.0.0.1:5556

        penstock gateway -e 'm=tcp://eu.lan:5555?region=eu' -e 'm=tcp://us.lan:5555?region=us' --set fleet.region=eu

        penstock gateway -e small=ipc:///run/small -e large=ipc:///run/large -c penstock.yaml --port 9000
    """
    from penstock.cli.terminal import flags, resolve_models, stderr
    from penstock.config import load, load_resolved
    from penstock.engine.process import die_with_parent
    from penstock.errors import ConfigError, PenstockError
    from penstock.fleet.registration import check_fleet
    from penstock.protocol.fleet_secret import FleetSecret
    from penstock.supervisor.launch import resolved as with_paths
    from penstock.supervisor.status import EncoderNeeded, Failed, Listening, StatusPipe

    status = StatusPipe(supervised)
    if supervised is not None:
        die_with_parent()
    try:
        endpoints = _endpoints(engine or [])
        curve = _curve(curve_key, curve_engines)
        if resolved is not None:
            config = load_resolved(resolved)
        else:
            given = flags(
                settings,
                server__host=host,
                server__port=port,
                server__workers=workers,
                fleet__url=fleet,
                logging__level=log_level,
            )
            first = load(config_file, flags=given)
            if not endpoints and control is None and not first.fleet.url:
                raise ConfigError(
                    "--engine MODEL=ENDPOINT is needed at least once, or --fleet URL; "
                    "`penstock serve` starts engines itself"
                )
            encoders = {encoder.name for encoder in first.encoders}
            named = [name for name in endpoints if name not in encoders]
            config = load(config_file, models=named, flags=given, bare=bool(first.fleet.url))
            config = with_paths(config, resolve_models(config, stderr(), weights=False))
        generators = endpoints.keys() - {encoder.name for encoder in config.encoders}
        if generators and fleet is not None:
            raise ConfigError("--engine and --fleet exclude each other: the registry says where the engines are")
        follows = bool(config.fleet.url) and control is None and not generators
        secret = FleetSecret.read(config.fleet.secret_file) if follows else FleetSecret.find(config.fleet.secret_file)
        if follows and secret is not None and supervised is None:
            check_fleet(config.fleet, secret)
        if supervised is None and config.server.workers > 1:
            _supervise(config, endpoints, curve_key, curve_engines)
            return
        if secret is not None:
            for name, found in endpoints.items():
                if name not in curve and all(endpoint.startswith("tcp://") for endpoint in found):
                    curve[name] = secret.gateway()
        from penstock.console import Console
        from penstock.gateway.process.main import run
        from penstock.gateway.process.settings import Worker

        run(
            config,
            endpoints,
            curve,
            ask=lambda encoder: status.send(EncoderNeeded(encoder)),
            control=control,
            worker=None if coordinator is None else Worker(worker, coordinator),
            listening=lambda: status.send(Listening()),
            beat=status.beat,
            wrap=Console if config.server.console else lambda app: app,
            secret=secret,
            fleet=_fleet_link(config, secret, worker) if follows and secret is not None else None,
        )
    except PenstockError as error:
        status.send(Failed(str(error)))
        raise


def _fleet_link(config: Config, secret: FleetSecret, worker: int) -> Callable[[Follow, Scaled], Link]:
    """Makes this gateway follow the fleet."""
    import penstock
    from penstock.fleet.gateway_link import FleetLink
    from penstock.fleet.membership import machine_name, own_address
    from penstock.fleet.records import GatewayRecord
    from penstock.fleet.redis_registry import RedisRegistry

    fleet, server = config.fleet, config.server
    host = own_address(fleet) if server.host in ("0.0.0.0", "::") else server.host
    record = GatewayRecord(
        machine=machine_name(fleet),
        url=f"http://{f'[{host}]' if ':' in host else host}:{server.port}",
        worker=worker,
        region=fleet.region,
        zone=fleet.zone,
        version=penstock.__version__,
    )

    def link(follow: Follow, scaled: Scaled) -> Link:
        registry = RedisRegistry(fleet.url, fleet.name, secret, lease_s=fleet.lease_s)
        configured = [model.name for model in config.models]
        return FleetLink(registry, record, follow, scaled, name=fleet.name, configured=configured)

    return link


def _supervise(config: Config, endpoints: dict[str, list[str]], key: Path | None, engines: Path | None) -> None:
    """Runs several gateways on one port and restarts them when they die."""
    import asyncio

    from penstock.cli.terminal import stderr
    from penstock.cli.terminal_reporter import TerminalReporter
    from penstock.gateway.http.port import check_port
    from penstock.supervisor.launch import gateways, worker_coordinator
    from penstock.supervisor.runtime import RuntimeFolder
    from penstock.supervisor.supervisor import Supervisor

    server = config.server
    check_port(server.host, server.port)
    if server.admin_port is not None:
        check_port(server.admin_host, server.admin_port)
    options = [] if key is None or engines is None else ["--curve-key", str(key), "--curve-engines", str(engines)]

    async def run(folder: RuntimeFolder) -> None:
        async with worker_coordinator(config, folder) as gateways_up:
            await Supervisor(
                engines=[],
                gateways=gateways(config, folder, endpoints, options),
                host=server.host,
                port=server.port,
                drain_s=server.drain_s,
                drain_delay_s=server.drain_delay_s,
                reporter=TerminalReporter(stderr(), config, bars=False),
                frozen_s=config.resilience.frozen_s,
                gateways_up=gateways_up,
            ).run()

    with RuntimeFolder() as folder:
        asyncio.run(run(folder))


def _endpoints(engines: list[str]) -> dict[str, list[str]]:
    from penstock.errors import ConfigError

    endpoints: dict[str, list[str]] = {}
    for engine in engines:
        name, equals, endpoint = engine.partition("=")
        if not equals or "://" not in endpoint:
            raise ConfigError(f"--engine {engine}: write it as MODEL=ENDPOINT, for example m=tcp://127.0.0.1:5555")
        endpoints.setdefault(name, []).append(endpoint)
    return endpoints


def _curve(key: Path | None, engines: Path | None) -> dict[str, CurveClient]:
    from penstock.errors import ConfigError
    from penstock.protocol.transport import CurveClient, public_key

    if key is None and engines is None:
        return {}
    if key is None or engines is None:
        raise ConfigError("--curve-key and --curve-engines must be given together")
    try:
        secret = key.read_text().strip()
        lines = [line.split() for line in engines.read_text().splitlines()]
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    public_key(secret)
    found = {}
    for number, words in enumerate(lines, start=1):
        if words and len(words) != 2:
            raise ConfigError(f"{engines}:{number}: expected the name of a model and the public key of its engine")
        if words:
            found[words[0]] = CurveClient(server_public_key=words[1], secret_key=secret)
    return found
