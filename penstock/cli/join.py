"""`penstock join`: adds this machine to a fleet, or runs ranks of an engine that is on another machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import ConfigFile, LogLevel, Settings

if TYPE_CHECKING:
    from penstock.protocol.transport import CurveClient

FLEET, RANKS = "Machines of a fleet (redis://)", "Ranks of one engine (tcp://)"


def join(
    where: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="The fleet's registry, redis://HOST:PORT (or rediss://); or where an engine waits for ranks (its "
            "placement.listen), tcp://HOST:PORT.",
        ),
    ],
    machine: Annotated[
        str | None,
        typer.Option("--as", metavar="NAME", help="This machine's name; in a fleet by default the host name."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="In a fleet: run this model here, whatever the controller says. With tcp://: the engine's model, from "
            "any source; by default smollm2-135m.",
        ),
    ] = None,
    log_level: LogLevel = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The fleet's secret (`penstock fleet secret`).", rich_help_panel=FLEET),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Replicas of --model; by default 1.", rich_help_panel=FLEET),
    ] = None,
    engines: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=256,
            help="How many engines this machine may run; by default one per GPU, or one per two cores.",
            rich_help_panel=FLEET,
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Address at which gateways reach this machine.", rich_help_panel=FLEET),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(help="Label for placement, such as spot; may be repeated.", rich_help_panel=FLEET),
    ] = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    draft_model: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Its draft model, if it has one.", rich_help_panel=RANKS)
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Device of the first rank here: cpu, cuda or cuda:N; by default the engine's.", rich_help_panel=RANKS
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads per rank; by default all cores that it may use.", rich_help_panel=RANKS),
    ] = None,
    curve_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CURVE secret key of this machine.", rich_help_panel=RANKS)
    ] = None,
    curve_engine: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CURVE public key of the engine.", rich_help_panel=RANKS)
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="End with the engine instead of joining the next.", rich_help_panel=RANKS)
    ] = False,
) -> None:
    """
    Add this machine to a running fleet, or run ranks of an engine that is on another machine.

    With redis://, the machine runs the engines that the fleet's controller assigns to it, and downloads their models.
    SIGTERM has its replicas started elsewhere first, if there is room, and lets running requests finish.

    With tcp://, it runs the ranks that an engine on another machine places on this one (its `placement`). It waits for
    the engine, joins again when the engine restarts or the connection is lost, and ends when it is refused.

    Examples:

        penstock fleet secret fleet.secret        # once; copy the file to each machine

        penstock join redis://redis.lan:6379 --secret-file fleet.secret

        penstock join redis://redis.lan:6379 --secret-file fleet.secret --as gpu7 --label spot --engines 4

        penstock join redis://redis.lan:6379 --secret-file fleet.secret --model smollm2-135m --replicas 2

        penstock join tcp://head:7001 --as host-b --model hf:org/large --curve-key host-b.key --curve-engine head.pub
    """
    ranks = {
        "--draft-model": draft_model,
        "--device": device,
        "--threads": threads,
        "--curve-key": curve_key,
        "--curve-engine": curve_engine,
        "--once": once or None,
    }
    fleet = {
        "--secret-file": secret_file,
        "--replicas": replicas,
        "--engines": engines,
        "--advertise": advertise,
        "--label": label,
        "--config": config_file,
        "--set": settings,
    }
    from penstock.errors import ConfigError

    if where.startswith(("redis://", "rediss://")):
        _refuse(ranks, "is for ranks (tcp://), not for a fleet")
        from penstock.cli.join_fleet import join_fleet

        join_fleet(
            where,
            machine,
            config_file=config_file,
            settings=[*(settings or []), *([f"logging.level={log_level}"] if log_level else [])],
            secret_file=secret_file,
            advertise=advertise,
            labels=label or [],
            model=model,
            replicas=replicas,
            engines=engines,
        )
        return
    if not where.startswith("tcp://"):
        raise ConfigError(f"{where}: redis://HOST:PORT joins a fleet, tcp://HOST:PORT an engine that waits for ranks")
    _refuse(fleet, "is for a fleet (redis://), not for ranks")
    if machine is None:
        raise ConfigError("--as NAME is needed: this machine's name in placement.machines of the engine")
    _run_ranks(
        where, machine, model or "smollm2-135m", draft_model, device, threads, curve_key, curve_engine, once, log_level
    )


def _run_ranks(
    endpoint: str,
    machine: str,
    model: str,
    draft_model: str | None,
    device: str | None,
    threads: int | None,
    curve_key: Path | None,
    curve_engine: Path | None,
    once: bool,
    log_level: str | None,
) -> None:
    import signal

    from penstock.cli.terminal import download_bar, stderr
    from penstock.engine_host.rank_host import Offer, RankHost
    from penstock.sources.resolve import resolve
    from penstock.telemetry import logging as telemetry_logging

    telemetry_logging.configure("text", log_level or "info")
    console = stderr()
    curve = _curve(curve_key, curve_engine)

    def find(source: str) -> Path:
        with download_bar(console, source) as progress:
            return resolve(source, progress)

    offer = Offer(machine, find(model), None if draft_model is None else find(draft_model), device, threads)
    host = RankHost(endpoint, offer, curve)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: host.stop())
    host.run(once=once)


def _refuse(options: Mapping[str, object], why: str) -> None:
    from penstock.errors import ConfigError

    given = next((name for name, value in options.items() if value is not None), None)
    if given is not None:
        raise ConfigError(f"{given} {why}")


def _curve(key: Path | None, engine: Path | None) -> CurveClient | None:
    from penstock.errors import ConfigError
    from penstock.protocol.transport import CurveClient, public_key

    if key is None and engine is None:
        return None
    if key is None or engine is None:
        raise ConfigError("--curve-key and --curve-engine must be given together")
    try:
        secret, server = key.read_text().strip(), engine.read_text().strip()
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    public_key(secret)
    if len(server) != 40:
        raise ConfigError(f"{engine}: this is not a CURVE public key (40 characters of Z85)")
    return CurveClient(server, secret)
