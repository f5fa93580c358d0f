"""The models of this gateway follow the supervisor, or the fleet: replicas are added and removed, models loaded and
unloaded.

Invariant: clients find a model from the moment its engines are ready until it is unloaded; requests that have begun by
then may finish. A model that cannot be served (its chat template is broken) does not keep others from being served.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from penstock.backends.native import NativeBackend
from penstock.config.load import read_model
from penstock.config.sampling import SamplingDefaults
from penstock.errors import PenstockError
from penstock.gateway.accounting.admission import Admissions
from penstock.gateway.app.background import BackgroundTasks
from penstock.gateway.process.settings import GatewaySettings, ModelSettings
from penstock.identity.labels import Labels
from penstock.metering.prices import PriceBook
from penstock.protocol.control import ModelScaling, Replica, Topology
from penstock.protocol.fleet_secret import FleetSecret
from penstock.protocol.transport import CurveClient
from penstock.routing.admission.admission import ModelAdmission
from penstock.routing.place import ReplicaPlace, split_endpoint
from penstock.routing.placement import Placer
from penstock.routing.policies import make_policy
from penstock.routing.regions import RegionChoice
from penstock.routing.registry import ModelRegistry, ServedModel
from penstock.routing.replicas import ReplicaSet
from penstock.sources.adapters import TextFetcher, adapter_folder
from penstock.sources.resolve import recommended_sampling, resolve
from penstock.text import TextModel, load_text
from penstock.text.adapter_text import AdapterTexts

IDLE_CHECK_S = 0.1

log = logging.getLogger("penstock.gateway")


def served(
    settings: GatewaySettings, model: ModelSettings, endpoints: Sequence[str], curve: CurveClient | None = None
) -> ServedModel:
    resilience = settings.how_resilient()
    if model.hold is not None:
        resilience = dataclasses.replace(resilience, park_s=max(resilience.park_s, model.hold.seconds))
    folder = resolve(model.source, weights=False)
    text = load_text(folder)
    texts = AdapterTexts(text, folder, adapter_folder, TextFetcher().due)
    for _, adapter in model.adapter_sources:
        texts.refresh(adapter)  # before it is asked for
    labelled = [split_endpoint(endpoint) for endpoint in endpoints]
    replicas = [native(model, str(index), endpoint, curve) for index, (endpoint, _) in enumerate(labelled)]
    routing = settings.routing
    return ServedModel(
        name=model.name,
        text=text,
        backend=ReplicaSet(
            model.name,
            replicas,
            resilience=resilience,
            policy=make_policy(settings.routing.policy),
            handover=model.handover,
            hold=model.hold,
            places={str(index): place for index, (_, place) in enumerate(labelled)},
            placer=Placer(model.pools, model.pool_rules, Labels(model.labels)),
            regions=RegionChoice(settings.region, routing.region_gain_s, routing.region_return_s),
            shared=settings.shares_engines,
        ),
        time_slice=model.time_slice,
        source=model.source,
        adapter_texts=texts,
        **client_settings(model, text),
    )


def client_settings(model: ModelSettings, text: TextModel) -> dict[str, Any]:
    """The settings of a served model that may change while it is served."""
    return {
        "aliases": model.aliases,
        "adapters": model.adapters,
        "adapter_owners": dict(model.adapter_owners),
        "adapter_sources": dict(model.adapter_sources),
        "input_price": model.input_price,
        "output_price": model.output_price,
        "cost_per_hour": model.cost_per_hour,
        "autoscale": model.autoscale,
        "tool_format": model.tool_format,
        "reasoning": model.reasoning,
        "thinking_budget": model.thinking_budget,
        "sampling": sampling_defaults(model, text),
        "fallback": model.fallback,
        "overflow_at": model.overflow_at,
        "autoscaled": model.autoscaled,
        "autoscaled_pools": tuple(pool.name for pool in model.pools if pool.autoscale is not None),
    }


def sampling_defaults(model: ModelSettings, text: TextModel) -> SamplingDefaults:
    """For requests that give no values: as configured, then the catalogue's, then the checkpoint's own."""
    if not model.sampling.from_checkpoint:
        return SamplingDefaults(**model.sampling.given)  # type: ignore[arg-type]
    listed = SamplingDefaults(**recommended_sampling(model.source))  # type: ignore[arg-type]
    return model.sampling.over(listed.over(text.sampling))


def native(model: ModelSettings, name: str, endpoint: str, curve: CurveClient | None = None) -> NativeBackend:
    """The client of one replica's engine."""
    return NativeBackend(endpoint, name=name, curve=curve, silence_s=model.silence_s, max_in_flight=model.max_in_flight)


def curve_of(replica: Replica, secret: FleetSecret | None) -> CurveClient | None:
    """The keys for an engine of a fleet."""
    if not replica.public_key:
        return None
    if secret is None:
        raise PenstockError(f"the engine at {replica.endpoint} has a key of a fleet, but this gateway has no secret")
    return secret.gateway(replica.public_key)


def place_of(replica: Replica) -> ReplicaPlace:
    return ReplicaPlace(replica.pool, replica.region, replica.zone, replica.machine)


class ModelFollower:
    """Makes the models of a gateway those of its supervisor."""

    def __init__(
        self,
        settings: GatewaySettings,
        registry: ModelRegistry,
        admissions: Admissions,
        prices: PriceBook,
        forget_answers: Callable[[str], Awaitable[None]],
        background: BackgroundTasks,
        secret: FleetSecret | None = None,
        encoders: Callable[[Topology], Awaitable[None]] | None = None,
    ) -> None:
        """`forget_answers` evicts a model's answers from the response cache. `secret`: gives the keys of engines on
        other machines. `encoders`: what follows the engines of encoders."""
        self._encoders = encoders
        self._settings = settings
        self._registry = registry
        self._admissions = admissions
        self._prices = prices
        self._forget_answers = forget_answers
        self._background = background
        self._secret = secret
        self._models = {model.name: model for model in settings.models}
        self._described: dict[str, Mapping[str, Any]] = {}
        """How the fleet last described each model."""

    async def follow(self, topology: Topology) -> dict[str, str]:
        """Returns the models that cannot be served, and why."""
        problems: dict[str, str] = {}
        if self._encoders is not None:
            await self._encoders(topology)
        for name in [*self._models, *(name for name in topology.models if name not in self._models)]:
            try:
                await self._follow(name, topology)
            except Exception as error:
                log.exception("a model cannot be served", extra={"model": name})
                problems[name] = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
        return problems

    def scaled(self, models: Mapping[str, ModelScaling]) -> None:
        """Automatic scaling reports; held requests need to know how long a start takes."""
        for model in self._registry:
            if model.name in models and isinstance(model.backend, ReplicaSet) and model.backend.hold is not None:
                model.backend.hold.cold_start_s = models[model.name].cold_start_s

    async def _follow(self, name: str, topology: Topology) -> None:
        if name not in topology.models:
            await self._remove(name)
        elif name in self._models:
            described = topology.loaded.get(name)
            if described is not None and self._described.setdefault(name, described) != described:
                await self._change(name, ModelSettings.of(read_model(described)))
                self._described[name] = described
            await self._update(self._models[name], topology.models[name])
        elif name in topology.loaded:
            await self._add(ModelSettings.of(read_model(topology.loaded[name])), topology.models[name])
            self._described[name] = topology.loaded[name]

    async def _change(self, name: str, settings: ModelSettings) -> None:
        """A model gets other settings while it is served. Its files and its time-slice group stay."""
        old = self._models[name]
        settings = dataclasses.replace(settings, source=old.source, time_slice=old.time_slice)
        model = self._registry.route(name).model
        backend = model.backend
        if settings == old or not isinstance(backend, ReplicaSet):
            return
        self._registry.rename(model, settings.aliases)
        for name_of, value in client_settings(settings, model.text).items():
            setattr(model, name_of, value)
        placer = Placer(settings.pools, settings.pool_rules, Labels(settings.labels))
        backend.change(placer=placer, handover=settings.handover, hold=settings.hold)
        self._prices.remove(old.price)
        self._prices.add(settings.price)
        self._models[name] = settings
        pools = [(pool.name, pool.reserve) for pool in settings.pools] != [(one.name, one.reserve) for one in old.pools]
        queues = await self._admissions.change(model, settings.downgrade_to, pools=pools)
        if queues is not None:
            self._background.start(self._close_when_empty(queues))
        log.info("a model has new settings", extra={"model": name})

    async def _close_when_empty(self, queues: ModelAdmission) -> None:
        while sum(queues.depths()):  # noqa: ASYNC110 (requests leave a queue in many ways)
            await asyncio.sleep(IDLE_CHECK_S)
        await queues.close()

    async def _update(self, model: ModelSettings, replicas: Sequence[Replica]) -> None:
        """New replicas join; those that are no longer listed get no new requests. One that has moved to another
        endpoint is a new one."""
        backend = self._registry.route(model.name).model.backend
        if not isinstance(backend, ReplicaSet):
            return
        wanted = {replica.name: replica for replica in replicas}
        staying = set()
        for member in [member for member in backend.members if not member.retiring]:
            endpoint = member.backend.endpoint if isinstance(member.backend, NativeBackend) else None
            if member.name in wanted and endpoint in (None, wanted[member.name].endpoint):
                backend.move(member, place_of(wanted[member.name]))
                staying.add(member.name)
            else:
                backend.retire(member.name)
        problem = await self._join(model, backend, [wanted[name] for name in wanted.keys() - staying])
        if problem:
            raise PenstockError(problem)

    async def _join(self, model: ModelSettings, backend: ReplicaSet, replicas: Iterable[Replica]) -> str:
        """Returns why some could not; these do not keep the others from joining."""
        problems = []
        for replica in replicas:
            try:
                await backend.join(self._native(model, replica), place_of(replica))
            except PenstockError as error:
                problems.append(f"{replica.name}: {error}")
        return "; ".join(problems)

    def _native(self, model: ModelSettings, replica: Replica) -> NativeBackend:
        return native(model, replica.name, replica.endpoint, curve_of(replica, self._secret))

    async def _add(self, settings: ModelSettings, replicas: Sequence[Replica]) -> None:
        if settings.time_slice:
            raise PenstockError(
                "it takes turns with others (time_slice), which the gateway that has it in its configuration decides"
            )
        model = await asyncio.to_thread(served, self._settings, settings, [])
        assert isinstance(model.backend, ReplicaSet)
        try:
            await model.backend.start()
            problem = await self._join(settings, model.backend, replicas)
            await self._admissions.add(model, settings.downgrade_to)
        except BaseException:
            await model.backend.close()
            raise
        self._prices.add(settings.price)
        self._registry.add(model)
        self._models[settings.name] = settings
        if problem:
            raise PenstockError(problem)

    async def _remove(self, name: str) -> None:
        self._described.pop(name, None)
        self._prices.remove(self._models.pop(name).price)
        model = self._registry.remove(name)
        await self._forget_answers(name)
        self._background.start(self._close_when_idle(model))

    async def _close_when_idle(self, model: ServedModel) -> None:
        while model.backend.in_flight:  # noqa: ASYNC110 (requests end in many ways, and there is no common event)
            await asyncio.sleep(IDLE_CHECK_S)
        await self._admissions.remove(model)
        await model.backend.close()
