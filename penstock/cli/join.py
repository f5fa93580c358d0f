"""`penstock join`: runs ranks of an engine that is on another machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import LogLevel

if TYPE_CHECKING:
    from penstock.protocol.transport import CurveClient


def join(
    endpoint: Annotated[str, typer.Argument(help="Where the engine waits (its placement.listen): tcp://HOST:PORT.")],
    machine: Annotated[str, typer.Option("--as", metavar="NAME", help="This machine's name in placement.machines.")],
    model: Annotated[
        str, typer.Option(metavar="SOURCE", help="The engine's model, from any source; the same checkpoint.")
    ] = "smollm2-135m",
    draft_model: Annotated[str | None, typer.Option(metavar="SOURCE", help="Its draft model, if it has one.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Device of the first rank here: cpu, cuda or cuda:N; by default the engine's.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads per rank; by default all cores.")] = None,
    curve_key: Annotated[Path | None, typer.Option(metavar="FILE", help="CURVE secret key of this machine.")] = None,
    curve_engine: Annotated[Path | None, typer.Option(metavar="FILE", help="CURVE public key of the engine.")] = None,
    once: Annotated[bool, typer.Option("--once", help="End with the engine instead of joining the next one.")] = False,
    log_level: LogLevel = None,
) -> None:
    """
    Run the ranks that an engine on another machine places on this one (its `placement`).

    It waits for the engine, and joins again when the engine restarts or the connection is lost. It ends when it is
    refused (wrong key, version, checkpoint or name) and on SIGTERM.

    Examples:

        penstock engine --make-curve-key host-b.key

        penstock join tcp://head:7001 --as host-b --model hf:org/large --curve-key host-b.key --curve-engine head.pub

        penstock join tcp://127.0.0.1:7001 --as b --model smollm2-135m
    """
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
