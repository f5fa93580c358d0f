"""`penstock engine`: one engine process on a ZeroMQ endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import (
    ConfigFile,
    Device,
    LogLevel,
    PipelineParallel,
    Resolved,
    Settings,
    Supervised,
    TensorParallel,
)

if TYPE_CHECKING:
    from penstock.config import Config, ModelConfig
    from penstock.config.encoders import EncoderConfig
    from penstock.engine.config import Role
    from penstock.engine_host.server import EngineServer
    from penstock.protocol.transport import CurveServer
    from penstock.supervisor.status import StatusPipe


class _Role(StrEnum):
    both = "both"
    prefill = "prefill"
    decode = "decode"


def engine(
    model: Annotated[
        str, typer.Argument(help="A model or an encoder of the configuration, or a source.")
    ] = "smollm2-135m",
    endpoint: Annotated[
        str, typer.Option("--endpoint", "-e", help="Where to listen: ipc://PATH or tcp://HOST:PORT.")
    ] = "tcp://127.0.0.1:5555",
    config_file: ConfigFile = None,
    device: Device = None,
    tensor_parallel: TensorParallel = None,
    pipeline_parallel: PipelineParallel = None,
    role: Annotated[
        _Role, typer.Option(help="prefill computes prompts for engines that decode; both does everything itself.")
    ] = _Role.both,
    log_level: LogLevel = None,
    settings: Settings = None,
    curve_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Secret key of this engine; needed beyond this machine.")
    ] = None,
    curve_clients: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Public keys of the gateways admitted, one per line.")
    ] = None,
    make_curve_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a new secret key to FILE, print its public key, stop.")
    ] = None,
    resolved: Resolved = None,
    supervised: Supervised = None,
) -> None:
    """
    Run one engine: token ids in, token ids out; or vectors, when it is an encoder.

    `penstock serve` starts these by itself; run one by hand to put it on another machine.

    SIGTERM finishes the running requests, then stops; twice stops at once.

    Examples:

        penstock engine smollm2-135m --endpoint tcp://127.0.0.1:5555

        penstock engine minilm --endpoint tcp://127.0.0.1:5556

        penstock engine smollm2-135m -e tcp://127.0.0.1:5557 --role prefill

        penstock engine --make-curve-key engine.key

        penstock engine -e tcp://0.0.0.0:5555 --curve-key engine.key --curve-clients gateways.txt
    """
    from dataclasses import replace

    from penstock.cli.terminal import flags, resolve_drafts, resolve_models, stderr
    from penstock.config import load, load_resolved
    from penstock.engine.process import die_with_parent
    from penstock.errors import ConfigError
    from penstock.supervisor.status import StatusPipe

    if make_curve_key is not None:
        _write_key(make_curve_key)
        return
    if supervised is not None:
        die_with_parent()
    status = StatusPipe(supervised)
    with _reported(status):
        config = load(config_file, flags=flags(settings)) if resolved is None else load_resolved(resolved)
        encoder = next((entry for entry in config.encoders if entry.name == model), None)
        if encoder is not None:
            encoder = replace(encoder, device=device or encoder.device)
            _configure_logging(config, log_level)
            code = _run_encoder(encoder, endpoint, _curve(curve_key, curve_clients), config.server.drain_s, status)
            raise typer.Exit(code)
        if resolved is not None:
            chosen = next((entry for entry in config.models if entry.name == model), None)
            if chosen is None:
                raise ConfigError(f"{resolved}: no model is called {model!r}")
            path = Path(chosen.source)
            if device is not None:
                chosen = replace(chosen, device=device)
        else:
            given = flags(
                settings,
                models__each__device=device,
                models__each__tensor_parallel=tensor_parallel,
                models__each__pipeline_parallel=pipeline_parallel,
                logging__level=log_level,
            )
            config = resolve_drafts(load(config_file, models=[model], flags=given), stderr())
            chosen = config.models[0]
            path = resolve_models(config, stderr())[chosen.name]
        _configure_logging(config)
        curve = _curve(curve_key, curve_clients)
        code = _run(chosen, path, role.value, endpoint, curve, config.server.drain_s, status)
    raise typer.Exit(code)


def _run(
    model: ModelConfig,
    path: Path,
    role: Role,
    endpoint: str,
    curve: CurveServer | None,
    drain_s: float,
    status: StatusPipe,
) -> int:
    import logging
    import time
    from dataclasses import replace

    from penstock.engine_host.pacer import Pacing, pick_interval
    from penstock.engine_host.server import EngineServer
    from penstock.engine_host.watchdog import Watchdog
    from penstock.protocol.transport import Listener
    from penstock.supervisor.status import Progress, Started

    log = logging.getLogger("penstock.engine")
    # Listen first: an endpoint that cannot be used is found before the model is loaded.
    with Listener(endpoint, curve=curve) as listener:
        status.send(Progress("import", 0.0))
        begin = time.perf_counter()
        from penstock.engine.config import EngineConfig
        from penstock.engine.core import Engine
        from penstock.engine.sleep.sleep import Slumber
        from penstock.engine_host.gpu_meter import open_meter
        from penstock.sources.adapters import resolve_adapter
        from penstock.text.vocabulary import grammars_of

        imported = round(time.perf_counter() - begin, 3)

        def load(config: EngineConfig) -> Engine:
            engine = Engine.load(
                config,
                lambda phase, fraction: status.send(Progress(phase, fraction)),
                grammars=grammars_of(path),
                find_adapter=resolve_adapter,
            )
            engine.meter = open_meter(engine.info.device, engine.info.ranks)
            if engine.ranks is not None:
                engine.ranks.watch(lambda why: server.fail(why))
            return engine

        config = replace(model.engine_config(str(path)), role=role)
        slumber = Slumber(config, load)
        # One that takes turns is loaded when its turn comes: others may have the memory now.
        first = slumber.unborn() if model.time_slice else load(config)
        info = first.info
        phases = {"import": imported, **info.startup}
        info.startup.clear()
        info.startup.update(phases)
        server = EngineServer(
            first,
            listener,
            sleeper=slumber,
            state="sleeping" if model.time_slice else "awake",
            watchdog=Watchdog(model.watchdog_s),
            pacing=Pacing(pick_interval(model.stream_interval_s, info.device)),
        )
        del first  # the server alone holds it, so that its memory is free when it sleeps
        _stop_on_signals(server, drain_s)
        log.info("serving %s on %s", info.model, listener.endpoint)
        status.send(Started(info))
        with status.beating():
            return server.run()


def _run_encoder(
    encoder: EncoderConfig, endpoint: str, curve: CurveServer | None, drain_s: float, status: StatusPipe
) -> int:
    """Fetches the model too, if it is not here: nobody waits for an encoder before somebody asks for it."""
    import logging

    from penstock.engine_host.server import EngineServer
    from penstock.engine_host.watchdog import Watchdog
    from penstock.protocol.transport import Listener
    from penstock.sources.resolve import resolve
    from penstock.supervisor.status import Progress, Started

    with Listener(endpoint, curve=curve) as listener:
        path = resolve(encoder.source, lambda what, done, all: status.send(Progress(what, done / all if all else 0.0)))
        status.send(Progress("import", 0.0))
        from penstock.engine.encoder.core import EncoderEngine

        engine = EncoderEngine.load(
            encoder.engine_config(str(path)), lambda phase, fraction: status.send(Progress(phase, fraction))
        )
        server = EngineServer(engine, listener, watchdog=Watchdog(encoder.watchdog_s))
        _stop_on_signals(server, drain_s)
        logging.getLogger("penstock.engine").info("encoding with %s on %s", engine.info.model, listener.endpoint)
        status.send(Started(engine.info))
        with status.beating():
            return server.run()


def _configure_logging(config: Config, level: str | None = None) -> None:
    from penstock.telemetry import logging as telemetry_logging

    telemetry_logging.configure(config.logging.format, level or config.logging.level)


def _stop_on_signals(server: EngineServer, drain_s: float) -> None:
    import signal
    from types import FrameType

    asked = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            server.stop("told to stop at once")
        asked = True
        server.drain(drain_s)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)


@contextmanager
def _reported(status: StatusPipe) -> Iterator[None]:
    """Let the supervisor know why starting failed."""
    from penstock.errors import PenstockError
    from penstock.supervisor.status import Failed

    try:
        yield
    except PenstockError as error:
        status.send(Failed(str(error)))
        raise


def _curve(key: Path | None, clients: Path | None) -> CurveServer | None:
    from penstock.errors import ConfigError
    from penstock.protocol.transport import CurveServer

    if key is None and clients is None:
        return None
    if key is None or clients is None:
        raise ConfigError("--curve-key and --curve-clients are given together")
    try:
        admitted = [line.strip() for line in clients.read_text().splitlines() if line.strip()]
        return CurveServer(key.read_text().strip(), admitted)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error


def _write_key(file: Path) -> None:
    import os

    from penstock.errors import ConfigError
    from penstock.protocol.transport import generate_keypair

    public, secret = generate_keypair()
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as handle:
        handle.write(secret + "\n")
    typer.echo(public)
