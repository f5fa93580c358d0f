"""`penstock engine`: one engine process on a ZeroMQ endpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import (
    ConfigFile,
    Device,
    Devices,
    ExpertParallel,
    FleetUrl,
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
    from penstock.config.placement import PlacementConfig
    from penstock.engine.config import Role
    from penstock.engine.grammar.interface import GrammarCompiler
    from penstock.engine.request import EngineInfo
    from penstock.engine_host.process import EngineProcess
    from penstock.engine_host.rank_hub import RankHub
    from penstock.fleet.registration import FleetEngine
    from penstock.supervisor.status import StatusPipe


DEFAULT_ENDPOINT = "tcp://127.0.0.1:5555"


class _Role(StrEnum):
    both = "both"
    prefill = "prefill"
    decode = "decode"


def engine(
    model: Annotated[
        str, typer.Argument(help="A model or encoder from the configuration, or a source.")
    ] = "smollm2-135m",
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint",
            "-e",
            help="Endpoint to listen on: ipc://PATH, tcp://HOST:PORT or tcp://HOST:FIRST-LAST (the first free port). "
            "Default: tcp://127.0.0.1:5555; in a fleet, a port of fleet.ports.",
        ),
    ] = None,
    config_file: ConfigFile = None,
    device: Device = None,
    tensor_parallel: TensorParallel = None,
    pipeline_parallel: PipelineParallel = None,
    devices: Devices = None,
    expert_parallel: ExpertParallel = None,
    role: Annotated[
        _Role, typer.Option(help="prefill: computes prompts for decode engines; both: does everything itself.")
    ] = _Role.both,
    pool: Annotated[str, typer.Option(metavar="NAME", help="One of the model's pools, whose settings it gets.")] = "",
    fleet: FleetUrl = None,
    log_level: LogLevel = None,
    settings: Settings = None,
    curve_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CURVE secret key; needed to listen beyond this machine.")
    ] = None,
    curve_clients: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CURVE public keys of the allowed gateways, one per line.")
    ] = None,
    make_curve_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a new secret key to FILE, print its public key, exit.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only ask the engine at --endpoint whether it answers; exit status 1: no.")
    ] = False,
    join_endpoint: Annotated[
        str | None, typer.Option(metavar="ENDPOINT", help="Where other machines join, in place of placement.listen.")
    ] = None,
    resolved: Resolved = None,
    supervised: Supervised = None,
) -> None:
    """
    Run one engine: token ids in, token ids out; for an encoder, vectors out.

    `penstock serve` starts engines itself; run one by hand to place it on another machine.

    In a fleet (`--fleet`, `fleet.url`) it registers, and the gateways of the fleet find it; the fleet's secret gives
    the keys.

    SIGTERM finishes the running requests, then stops; a second SIGTERM stops at once.

    Examples:

        penstock engine smollm2-135m --endpoint tcp://127.0.0.1:5555

        penstock engine minilm --endpoint tcp://127.0.0.1:5556

        penstock engine smollm2-135m -e tcp://127.0.0.1:5557 --role prefill

        penstock engine --check -e tcp://127.0.0.1:5555

        penstock engine smollm2-135m -e tcp://127.0.0.1:5558 --pool batch -c penstock.yaml

        penstock engine smollm2-135m --fleet redis://redis.lan --set fleet.secret_file=fleet.secret

        penstock engine --make-curve-key engine.key

        penstock engine -e tcp://0.0.0.0:5555 --curve-key engine.key --curve-clients gateways.txt
    """
    if check:
        _check(endpoint or DEFAULT_ENDPOINT, config_file, settings)
        return
    from dataclasses import replace

    from penstock.cli.terminal import flags, resolve_drafts, resolve_models, stderr
    from penstock.config import load, load_resolved
    from penstock.engine.process import die_with_parent
    from penstock.errors import ConfigError, require_extra
    from penstock.protocol.transport import write_secret_key
    from penstock.supervisor.status import StatusPipe

    if make_curve_key is not None:
        typer.echo(write_secret_key(make_curve_key))
        return
    if supervised is not None:
        die_with_parent()
    status = StatusPipe(supervised)
    with _failure_reported(status):
        require_extra("engine", "an engine")
        named = flags(settings, fleet__url=fleet)
        config = load(config_file, flags=named) if resolved is None else load_resolved(resolved)
        encoder = next((entry for entry in config.encoders if entry.name == model), None)
        if encoder is not None:
            encoder = replace(encoder, device=device or encoder.device)
            _configure_logging(config, log_level)
            member = None
            if config.fleet.url and supervised is None:
                if curve_key is not None or curve_clients is not None:
                    raise ConfigError("in a fleet its secret gives the keys; leave out --curve-key and --curve-clients")
                member = _member(config, encoder)
                endpoint = member.endpoint(endpoint)
            process = _process(endpoint, curve_key, curve_clients, config, status, member)
            raise typer.Exit(_run_encoder(process, encoder))
        member = None
        if resolved is not None:
            chosen = next((entry for entry in config.models if entry.name == model), None)
            if chosen is None:
                raise ConfigError(f"{resolved}: no model is called {model!r}")
            path = Path(chosen.source)
            chosen = replace(
                _in_pool(chosen, pool),
                device=device or chosen.device,
                tensor_parallel=tensor_parallel or chosen.tensor_parallel,
                pipeline_parallel=pipeline_parallel or chosen.pipeline_parallel,
            )
        else:
            given = flags(
                settings,
                fleet__url=fleet,
                models__each__device=device,
                models__each__tensor_parallel=tensor_parallel,
                models__each__pipeline_parallel=pipeline_parallel,
                models__each__devices=None if devices is None else f"[{devices}]",
                models__each__expert_parallel=expert_parallel,
                logging__level=log_level,
            )
            config = load(config_file, models=[model], flags=given)
            if config.fleet.url and supervised is None:
                if curve_key is not None or curve_clients is not None:
                    raise ConfigError("in a fleet its secret gives the keys; leave out --curve-key and --curve-clients")
                member = _member(config, config.models[0], pool)
                endpoint = member.endpoint(endpoint)
            config = resolve_drafts(config, stderr())
            chosen = _in_pool(config.models[0], pool)
            chosen = replace(chosen, device=device or chosen.device)
            path = resolve_models(config, stderr())[chosen.name]
        _configure_logging(config)
        process = _process(endpoint, curve_key, curve_clients, config, status, member)
        code = _run_generator(process, chosen, path, role.value, join_endpoint)
    raise typer.Exit(code)


def _check(endpoint: str, config_file: Path | None, settings: list[str] | None) -> None:
    """Imports no more than the question needs: probes run it every few seconds."""
    from penstock.cli.terminal import flags
    from penstock.config import load
    from penstock.protocol.fleet_secret import FleetSecret
    from penstock.protocol.probe import answers

    secret = FleetSecret.find(load(config_file, flags=flags(settings)).fleet.secret_file)
    curve = secret.gateway() if secret is not None and endpoint.startswith("tcp://") else None
    if not answers(endpoint, curve):
        typer.echo(f"{endpoint}: no answer; the engine is loading or stuck, or has another fleet secret", err=True)
        raise typer.Exit(1)
    typer.echo(f"{endpoint}: an engine answers")


def _in_pool(model: ModelConfig, pool: str) -> ModelConfig:
    """The model with the settings of one of its pools."""
    from penstock.errors import ConfigError

    names = [one.name for one in model.pools]
    if pool and pool not in names:
        raise ConfigError(
            f"--pool {pool}: {model.name} has " + (f"the pools {', '.join(names)}" if names else "no pools")
        )
    return model.in_pool(pool)


def _member(config: Config, model: ModelConfig | EncoderConfig, pool: str = "") -> FleetEngine:
    """The engine of a model, as a member of the fleet."""
    from penstock.fleet.registration import FleetEngine
    from penstock.protocol.fleet_secret import FleetSecret

    return FleetEngine(config.fleet, FleetSecret.read(config.fleet.secret_file), model, pool)


def _process(
    endpoint: str | None,
    curve_key: Path | None,
    curve_clients: Path | None,
    config: Config,
    status: StatusPipe,
    member: FleetEngine | None = None,
) -> EngineProcess:
    """An engine process that reports to the supervisor, and registers in the fleet where it is a `member` of one."""
    from penstock.engine_host.process import EngineProcess
    from penstock.protocol.fleet_secret import FleetSecret
    from penstock.protocol.transport import CurveServer, public_key
    from penstock.supervisor.status import Progress, Started

    endpoint = endpoint or DEFAULT_ENDPOINT
    curve = CurveServer.read(curve_key, curve_clients)
    if curve is None and endpoint.startswith("tcp://"):
        secret = FleetSecret.find(config.fleet.secret_file)
        curve = None if secret is None else secret.engine()

    @contextmanager
    def serving(info: EngineInfo, listens: str) -> Iterator[None]:
        status.send(Started(info))
        with ExitStack() as stack:
            stack.enter_context(status.heartbeats())
            if member is not None:
                key = "" if curve is None else public_key(curve.secret_key)
                stack.enter_context(member.serving(info, listens, key))
            yield

    return EngineProcess(
        endpoint,
        curve,
        config.server.drain_s,
        progress=lambda phase, fraction: status.send(Progress(phase, fraction)),
        serving=serving,
        draining=member.draining if member is not None else lambda: None,
    )


def _run_generator(
    process: EngineProcess, model: ModelConfig, path: Path, role: Role, join_endpoint: str | None
) -> int:
    from dataclasses import replace

    from penstock.sources.adapters import needs_of_listed, resolve_adapter

    def grammars(vocab_size: int) -> GrammarCompiler:
        from penstock.text.vocabulary import grammars_of  # a tokenizer, which only grammars need here

        return grammars_of(path)(vocab_size)

    rank, vectors = model.adapter_rank, model.adapter_vectors
    elsewhere: tuple[tuple[int, int], ...] = ()
    if None in (rank, vectors, model.adapter_tokens, model.adapter_rows, model.adapter_memory):
        needs = needs_of_listed(model.adapters)
        rank, vectors = rank or needs.rank, needs.vectors if vectors is None else vectors
        elsewhere = needs.elsewhere
    return process.run_generator(
        replace(
            model.engine_config(str(path)),
            role=role,
            adapter_rank=rank,
            adapter_vectors=vectors,
            adapters_elsewhere=elsewhere,
        ),
        grammars=grammars,
        find_adapter=resolve_adapter,
        watchdog_s=model.watchdog_s,
        stream_interval_s=model.stream_interval_s,
        start_asleep=bool(model.time_slice),
        machines=None if model.placement is None else _machines(process, model, model.placement, join_endpoint),
    )


def _machines(
    process: EngineProcess, model: ModelConfig, placement: PlacementConfig, endpoint: str | None
) -> Callable[[], RankHub]:
    """Meets the machines of a placement."""
    from penstock.engine_host.rank_hub import RankHub
    from penstock.protocol.transport import CurveServer

    key, clients = (Path(file) if file else None for file in (placement.curve_key, placement.curve_clients))
    curve = CurveServer.read(key, clients)

    def meet() -> RankHub:
        return RankHub(
            endpoint or placement.listen,
            curve,
            join_s=placement.join_s,
            progress=process.progress,
            source=model.source,
        )

    return meet


def _run_encoder(process: EngineProcess, encoder: EncoderConfig) -> int:
    from penstock.engine.encoder.config import EncoderEngineConfig
    from penstock.sources.resolve import resolve

    def find() -> EncoderEngineConfig:
        path = resolve(encoder.source, lambda what, done, total: process.progress(what, done / total if total else 0.0))
        return encoder.engine_config(str(path))

    return process.run_encoder(find, watchdog_s=encoder.watchdog_s)


def _configure_logging(config: Config, level: str | None = None) -> None:
    from penstock.telemetry import logging as telemetry_logging

    telemetry_logging.configure(config.logging.format, level or config.logging.level)


@contextmanager
def _failure_reported(status: StatusPipe) -> Iterator[None]:
    """Tell the supervisor why starting failed."""
    from penstock.errors import PenstockError
    from penstock.supervisor.status import Failed

    try:
        yield
    except PenstockError as error:
        status.send(Failed(str(error)))
        raise
