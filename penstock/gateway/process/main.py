"""The gateway process: loads tokenizers and templates, connects to the engines, listens, drains.

HTTP is parsed on the same event loop that answers (`http/`): handing requests between threads costs more than parsing
them. Sockets are bound with SO_REUSEPORT, so several gateway processes can share one port; each has its own engine
connections, and the supervisor's coordinator counts for all of them (`workers/`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import uvloop

from penstock.backends.encoder import EncoderBackend
from penstock.backends.encoder_set import EncoderSet
from penstock.backends.remote.server import RemoteServer
from penstock.backends.remote.upstream import DialectName, Upstream
from penstock.config.encoders import EncoderConfig
from penstock.config.remotes import RemoteConfig
from penstock.config.schema import Config
from penstock.errors import ConfigError, PenstockError
from penstock.gateway.api.endpoints import ENDPOINTS
from penstock.gateway.api.reply_schemas import REPLIES
from penstock.gateway.app.asgi import App
from penstock.gateway.app.docs_page import PAGES, Documentation
from penstock.gateway.app.endpoint import Door, bind
from penstock.gateway.http.connections import Application
from penstock.gateway.http.listener import Listener
from penstock.gateway.http.port import check_port
from penstock.gateway.process import garbage_collection
from penstock.gateway.process.composition import compose
from penstock.gateway.process.encoder_follower import encoder_backend, served_encoder
from penstock.gateway.process.endpoints import endpoints_of
from penstock.gateway.process.gateway import Gateway
from penstock.gateway.process.limits import MOST_CONNECTIONS, connections
from penstock.gateway.process.model_follower import served
from penstock.gateway.process.settings import GatewaySettings, Worker
from penstock.gateway.process.supervisor_link import Follow, Link, Scaled
from penstock.identity.exposure import check_exposure
from penstock.identity.labels import Labels
from penstock.protocol.fleet_secret import FleetSecret
from penstock.protocol.transport import CurveClient
from penstock.routing.encoders import Encoders
from penstock.routing.regions import RegionChoice
from penstock.routing.registry import ModelRegistry
from penstock.routing.remotes import RemoteModel
from penstock.sources.resolve import resolve
from penstock.telemetry import logging as telemetry_logging
from penstock.text import TextModel, load_text

log = logging.getLogger("penstock.gateway")

CLOSE_S = 1.5
"""How long the listener may take to close its connections once the drain is over."""


def run(
    config: Config,
    endpoints: Mapping[str, Sequence[str]],
    curve: Mapping[str, CurveClient] | None = None,
    *,
    ask: Callable[[str], None] | None = None,
    control: Path | None = None,
    worker: Worker | None = None,
    listening: Callable[[], None] = lambda: None,
    beat: Callable[[], Awaitable[None]] | None = None,
    wrap: Callable[[App], Application] = lambda app: app,
    secret: FleetSecret | None = None,
    fleet: Callable[[Follow, Scaled], Link] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. `endpoints`: the ZeroMQ endpoints of models' replicas and of encoders, by name;
    `curve`: the keys for those on other machines; `ask`: called with the name of an encoder to have it started;
    `control`: the supervisor's socket, which says which replicas there are from then on; `worker`: which of several
    processes on the port this is; `listening` is called once connections are accepted; `beat` runs beside the server
    and sends its heartbeats; `wrap`: puts something in front of the application, such as the console;
    `secret`: gives the keys of engines on other machines; `fleet`: makes the link to a fleet, which says which models
    and replicas there are where there is no supervisor."""
    settings = GatewaySettings.from_config(config, worker)
    # Several gateways tell each other what they sent to which engine; the only one of a server has nobody to tell.
    alone = control is not None and worker is None and secret is None
    settings = dataclasses.replace(settings, shares_engines=not alone)
    if control is None and fleet is None:  # nobody starts engines for this gateway, so no request may wait for that
        fixed = tuple(dataclasses.replace(model, autoscaled=False, hold=None) for model in settings.models)
        settings = dataclasses.replace(settings, models=fixed)
    telemetry_logging.configure(settings.log_format, settings.log_level)
    missing = [model.name for model in settings.models if model.name not in endpoints]
    if missing and control is None and fleet is None:
        raise ConfigError(f"no engine endpoint was given for: {', '.join(missing)}")
    if worker is None:
        check_port(settings.host, settings.port)
        if settings.admin_port is not None:
            check_port(settings.admin_host, settings.admin_port)
    uvloop.run(_run(settings, endpoints, curve or {}, ask, control, listening, beat, wrap, secret, fleet))


async def _run(
    settings: GatewaySettings,
    endpoints: Mapping[str, Sequence[str]],
    curve: Mapping[str, CurveClient],
    ask: Callable[[str], None] | None,
    control: Path | None,
    listening: Callable[[], None],
    beat: Callable[[], Awaitable[None]] | None,
    wrap: Callable[[App], Application],
    secret: FleetSecret | None,
    fleet: Callable[[Follow, Scaled], Link] | None,
) -> None:
    await check_exposure(settings.host, settings.store_url or "")
    if settings.admin_port is not None:
        await check_exposure(settings.admin_host, settings.store_url or "")
    registry = ModelRegistry(
        (served(settings, model, endpoints.get(model.name, ()), curve.get(model.name)) for model in settings.models),
        (_remote(settings, remote) for remote in settings.remotes),
    )
    encoders = Encoders(
        (
            served_encoder(encoder, EncoderSet(_own(encoder, endpoints, curve)), ask)
            for encoder in settings.encoders
            if encoder.name in endpoints
        ),
        settings.encoders,
        registry.remotes.values(),
    )
    garbage_collection.tune()
    stop = asyncio.Event()
    heart = None if beat is None else asyncio.ensure_future(beat())
    try:
        with _signals(stop):
            await serve(
                settings,
                registry,
                stop,
                lambda gateway: listening(),
                encoders=encoders,
                control=control,
                wrap=wrap,
                secret=secret,
                fleet=fleet,
            )
    finally:
        if heart is not None:
            heart.cancel()
            await asyncio.gather(heart, return_exceptions=True)


def _remote(settings: GatewaySettings, remote: RemoteConfig) -> RemoteModel:
    resilience = settings.how_resilient()
    upstreams = [
        Upstream(
            url,
            remote.model,
            remote.key_env,
            remote.timeout_s,
            dialect=cast(DialectName, remote.dialect),
            key_file=remote.key_file,
            api_version=remote.api_version,
            aws_region=remote.aws_region,
            streamed=remote.streamed,
            max_tokens=remote.default_max_tokens,
        )
        for url in remote.urls
    ]
    model = RemoteModel(
        remote.name,
        [RemoteServer(str(index), upstream) for index, upstream in enumerate(upstreams)],
        aliases=remote.aliases,
        input_price=remote.input_price,
        output_price=remote.output_price,
        max_in_flight=remote.max_in_flight,
        max_waiting=remote.max_waiting,
        metrics_s=remote.metrics_s,
        context_window=remote.context_window,
        check_s=remote.check_s,
        limit_field=remote.max_tokens_field,
        breaker=resilience.breaker,
        retry_share=resilience.retry_share,
        regions=remote.regions,
        labels=Labels(remote.labels),
        choice=RegionChoice(settings.region, settings.routing.region_gain_s, settings.routing.region_return_s),
    )
    model.kind, model.dimensions = remote.kind, remote.dimensions
    model.texts_per_request, model.fallback = remote.texts_per_request, remote.fallback
    if remote.tokenizer:
        model.text = tokenizer(remote)
    return model


def tokenizer(remote: RemoteConfig) -> TextModel:
    """The configured tokenizer of a remote model."""
    source = Path(remote.tokenizer)
    if source.name == "tokenizer.json":
        return load_text(source.parent)
    try:
        return load_text(resolve(remote.tokenizer, weights=False))
    except PenstockError as error:
        raise ConfigError(f"remotes: {remote.name}: tokenizer: {error}") from error


def _own(
    encoder: EncoderConfig, endpoints: Mapping[str, Sequence[str]], curve: Mapping[str, CurveClient]
) -> EncoderBackend:
    """The engine that was named for an encoder."""
    return encoder_backend(encoder, endpoints[encoder.name][0], curve.get(encoder.name))


async def serve(
    settings: GatewaySettings,
    registry: ModelRegistry,
    stop: asyncio.Event,
    listening: Callable[[Gateway], None] | None = None,
    encoders: Encoders | None = None,
    control: Path | None = None,
    wrap: Callable[[App], Application] = lambda app: app,
    secret: FleetSecret | None = None,
    fleet: Callable[[Follow, Scaled], Link] | None = None,
) -> None:
    """Listen until `stop` is set, then drain. `listening` is called once connections are accepted."""
    async with compose(
        settings, registry, encoders or Encoders((), (), registry.remotes.values()), control, secret, fleet
    ) as gateway:
        room = min(connections(), settings.max_connections or MOST_CONNECTIONS)
        doors: list[tuple[Door, str, int]] = [("all", settings.host, settings.port)]
        if settings.admin_port is not None:
            doors = [("public", settings.host, settings.port), ("admin", settings.admin_host, settings.admin_port)]
        owners = endpoints_of(gateway)
        apps = [application(gateway, owners, door) for door, _, _ in doors]
        # The console is an administration tool: it is served on the admin port where there is one.
        fronts: list[Application] = [
            app if door == "public" else wrap(app) for app, (door, _, _) in zip(apps, doors, strict=True)
        ]
        listeners = [
            Listener(
                front,
                app.failed,
                host,
                port,
                head_limit=settings.header_limit,
                receive_s=settings.receive_s,
                stalled_reader_s=settings.stalled_reader_s,
                room=room,
                room_per_address=settings.connections_per_address,
            )
            for front, app, (_, host, port) in zip(fronts, apps, doors, strict=True)
        ]
        ends = [
            asyncio.create_task(stop.wait(), name="stop signal"),
            asyncio.create_task(gateway.workers.lost.wait(), name="coordinator lost"),
        ]
        try:
            for (_, host, port), listener in zip(doors, listeners, strict=True):
                await listener.start()
                log.info("listening", extra={"url": f"http://{host}:{port}"})
            if gateway.batch_runner is not None:
                gateway.batch_runner.start(apps[0].answer_in_memory, apps[0].paths)
            if gateway.background_responses is not None:
                gateway.background_responses.start(apps[0].answer_in_memory)
            if listening is not None:
                listening(gateway)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                log.info("draining", extra={"seconds": settings.drain_s, "after": settings.drain_delay_s})
                await gateway.drain.run(settings.drain_s, settings.drain_delay_s)
        finally:
            for task in ends:
                task.cancel()
            # A client that does not read must not keep the process alive.
            await asyncio.gather(*(listener.close(CLOSE_S) for listener in listeners))
            await asyncio.gather(*ends, return_exceptions=True)
    if not stop.is_set():
        raise PenstockError("the connection to the supervisor's worker coordinator was lost")
    log.info("stopped")


def application(gateway: Gateway, owners: Sequence[object], door: Door) -> App:
    """What is served on one port. `owners`: of the methods that answer."""
    endpoints = [endpoint for endpoint in ENDPOINTS if endpoint.behind(door)]
    return App(
        bind((*endpoints, *PAGES), [*owners, Documentation(endpoints, REPLIES)]),
        authentication=gateway.authentication,
        drain=gateway.drain,
        metrics=gateway.metrics,
        tracing=gateway.tracing,
        record=gateway.request_log.add,
        cors_origins=gateway.settings.cors_origins,
        stalled_reader_s=gateway.settings.stalled_reader_s,
        receive_s=gateway.settings.receive_s,
        bodies=gateway.bodies,
        refuses_unknown=gateway.settings.refuses_unknown,
        data_rules=gateway.data_rules,
        audit=None if gateway.audit is None else gateway.audit.put,
    )


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop`; a second signal kills the process."""
    loop = asyncio.get_running_loop()

    def request_stop(number: signal.Signals) -> None:
        if stop.is_set():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, request_stop, number)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
