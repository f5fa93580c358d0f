"""`penstock fleet`: the machines of a fleet, straight from its registry."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.cli.lists import Column, Output, show
from penstock.cli.options import ConfigFile, LogLevel, Settings

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.fleet.registry import Registry
    from penstock.fleet.view import FleetView

app = typer.Typer(
    no_args_is_help=True,
    help="The machines of a fleet: who is in it, its secret, which models it should serve.",
)
Where = Annotated[
    str | None,
    typer.Option("--url", "-u", metavar="URL", help="The registry, redis://HOST:PORT; by default fleet.url."),
]
SecretFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The fleet's secret; by default fleet.secret_file.")
]
Part = Literal["machines", "gateways", "engines", "models"]


@app.command()
def secret(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write; must not exist.")],
) -> None:
    """
    Write a new secret, which all machines of a fleet share; readable by its owner only.

    Copy it to each machine and name it in fleet.secret_file or --secret-file. It encrypts and authenticates everything
    between machines.

    Example:

        penstock fleet secret fleet.secret
    """
    from penstock.protocol import fleet_secret

    fleet_secret.write(file)
    typer.echo(f"{file}: copy it to each machine (and keep it secret)")


@app.command()
def status(
    part: Annotated[Part | None, typer.Argument(help="machines, gateways, engines or models; by default all.")] = None,
    url: Where = None,
    secret_file: SecretFile = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    output: Output = "table",
) -> None:
    """
    Show the machines, gateways, engines and models of a fleet, and which machine is the controller.

    Examples:

        penstock fleet status

        penstock fleet status engines -o csv

        penstock fleet status --url redis://redis.lan:6379 --secret-file fleet.secret -o json
    """
    import json

    import msgspec

    from penstock.fleet.status import fleet_state

    config = _config(url, secret_file, config_file, settings)

    async def read(registry: Registry, view: FleetView) -> Any:
        return fleet_state(config.fleet.name, view.fleet)

    state = msgspec.to_builtins(_with_registry(config, read))
    if output == "json" and part is None:
        typer.echo(json.dumps(state, indent=2))
        return
    if output == "csv" and part is None:
        part = "machines"
    if part is None:
        typer.echo(f"fleet `{state['name']}`, controller: {state['controller'] or 'nobody'}")
        for move in state["moves"]:
            typer.echo(f"moves {move}")
    shown = (part,) if part is not None else ("machines", "gateways", "engines", "models")
    for name in shown:
        if part is None:
            typer.echo()
        show(_COLUMNS[name], state[name], output, empty=f"no {name}")


@app.command()
def apply(
    wait: Annotated[bool, typer.Option("--wait", help="Return when all replicas have the settings.")] = False,
    url: Where = None,
    secret_file: SecretFile = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """
    Tell a fleet which models to serve: those of a configuration file. Models that it does not mention stay.

    `penstock serve` with fleet.url does the same when it starts. Settings that have changed reach running engines by
    a rolling replacement, one machine after the other; `--wait` follows it.

    Examples:

        penstock fleet apply -c penstock.yaml

        penstock fleet apply -c penstock.yaml --wait
    """
    from penstock.fleet.machine_process import desired, refuse_fixed
    from penstock.fleet.membership import described
    from penstock.fleet.operations import settled

    config = _config(url, secret_file, config_file, settings)
    refuse_fixed(config)

    async def put(registry: Registry, view: FleetView) -> None:
        records = [desired(view.fleet, model, described(model)) for model in config.models]
        for record in records:
            await registry.publish(record)
            typer.echo(f"{record.name}: {record.replicas} {'replica' if record.replicas == 1 else 'replicas'}")
        if wait:
            await settled(view, records, lambda line: typer.echo(line))

    _with_registry(config, put)


@app.command()
def remove(
    machine: Annotated[str, typer.Argument(help="Machine, as in `penstock fleet status`.")],
    notice: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="The machine goes away after this time.")
    ] = None,
    url: Where = None,
    secret_file: SecretFile = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """
    Let a machine leave: its replicas are started elsewhere first, if there is room, then it drains and stops.

    `penstock drain --machine NAME` does the same through the admin API of a gateway.

    Examples:

        penstock fleet remove gpu7

        penstock fleet remove gpu7 --notice 120
    """
    config = _config(url, secret_file, config_file, settings)

    async def leave(registry: Registry, view: FleetView) -> None:
        from penstock.fleet.operations import FleetOperations

        await FleetOperations(registry, view).leave(machine, notice)
        typer.echo(f"{machine} is leaving")

    _with_registry(config, leave)


@app.command()
def controller(
    url: Where = None,
    secret_file: SecretFile = None,
    config_file: ConfigFile = None,
    log_level: LogLevel = None,
    settings: Settings = None,
) -> None:
    """
    Run a controller on its own. Every machine has one and one of them decides; this is for fleets whose machines should
    only run engines.

    Example:

        penstock fleet controller --url redis://redis.lan:6379 --secret-file fleet.secret
    """
    import os

    from penstock.telemetry import logging as telemetry_logging

    config = _config(url, secret_file, config_file, settings)
    telemetry_logging.configure(config.logging.format, log_level or config.logging.level)

    async def lead(registry: Registry, view: FleetView) -> None:
        import asyncio
        import signal

        from penstock.fleet.controller import Controller
        from penstock.fleet.machine_process import beside
        from penstock.fleet.membership import machine_name

        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        name = f"controller on {machine_name(config.fleet)} ({os.getpid()})"
        fleet = config.fleet
        leader = Controller(registry, view, name, lease_s=fleet.lease_s, rebalance_s=fleet.rebalance_s)
        async with beside(leader.run(), "controller"):
            await stop.wait()

    _with_registry(config, lead)


def _config(url: str | None, secret_file: Path | None, config_file: Path | None, settings: list[str] | None) -> Config:
    from penstock.cli.terminal import flags
    from penstock.config import load
    from penstock.errors import ConfigError

    config = load(config_file, flags=flags(settings, fleet__url=url, fleet__secret_file=secret_file))
    if not config.fleet.url:
        raise ConfigError("which fleet? Give --url redis://HOST:PORT, or set fleet.url in the configuration")
    return config


def _with_registry(config: Config, work: Callable[[Registry, FleetView], Awaitable[Any]]) -> Any:
    import asyncio

    from penstock.fleet.machine_process import joined
    from penstock.protocol.fleet_secret import FleetSecret

    secret = FleetSecret.read(config.fleet.secret_file)

    async def run() -> Any:
        async with joined(config.fleet, secret, required=True) as (registry, view):
            return await work(registry, view)

    return asyncio.run(run())


_Row = dict[str, Any]


def _column(name: str, rank: int = 1, key: str | None = None, *, fold: bool = False) -> Column[_Row]:
    return Column(name, lambda row: row[key or name], rank=rank, fold=fold)


_COLUMNS: dict[str, list[Column[_Row]]] = {
    "machines": [
        _column("machine", 0, "name"),
        _column("state", 0),
        _column("controller"),
        _column("engines", 0),
        _column("room"),
        Column("busy", lambda row: row["busy"], lambda row: f"{row['busy']:.0%}", rank=3),
        _column("zone", 2),
        _column("region", 3),
        _column("labels", 3),
        _column("cpus", 3),
        _column("devices", 3),
        _column("address", 2),
        _column("version", 4),
        Column("problems", lambda row: "; ".join(f"{key}: {why}" for key, why in row["problems"].items()), fold=True),
    ],
    "gateways": [
        _column("gateway", 0, "url"),
        _column("machine", 0),
        _column("state", 0),
        _column("zone", 2),
        _column("version", 3),
    ],
    "engines": [
        _column("engine", 0, "id"),
        _column("machine", 2),
        _column("state", 0),
        _column("role", 3),
        _column("pool", 3),
        _column("variant", 2),
        _column("device", 2),
        _column("zone", 2),
        _column("version", 3),
        _column("protocol", 4),
    ],
    "models": [
        _column("model", 0, "name"),
        _column("wanted", 0),
        _column("ready", 0),
        _column("autoscaled", 2),
        _column("new settings", 1, "rollout", fold=True),
        _column("problem", fold=True),
    ],
}
