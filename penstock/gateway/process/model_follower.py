"""The models that run here, as the supervisor says: their replicas, and models that come and go while it runs.

Invariant: a model is found by clients from the moment its engines are ready until it is unloaded; who has begun by then
may finish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.backends.native import NativeBackend
from penstock.config.load import check_model
from penstock.gateway.process.service import Service
from penstock.gateway.process.settings import GatewaySettings, ModelSettings
from penstock.protocol.control import Replica, Topology
from penstock.protocol.transport import CurveClient
from penstock.routing.policies import make_policy
from penstock.routing.registry import ServedModel
from penstock.routing.replicas import ReplicaSet
from penstock.sources.resolve import resolve
from penstock.text import load_text

LOOK_S = 0.1


def served(
    settings: GatewaySettings, model: ModelSettings, endpoints: Sequence[str], curve: CurveClient | None = None
) -> ServedModel:
    replicas = [native(model, str(index), endpoint, curve) for index, endpoint in enumerate(endpoints)]
    return ServedModel(
        name=model.name,
        text=load_text(resolve(model.source)),
        backend=ReplicaSet(
            model.name,
            replicas,
            resilience=settings.how_resilient(),
            policy=make_policy(settings.routing.policy),
            handover=model.handover,
        ),
        aliases=model.aliases,
        time_slice=model.time_slice,
        adapters=model.adapters,
        input_price=model.input_price,
        output_price=model.output_price,
        cost_per_hour=model.cost_per_hour,
        tool_format=model.tool_format,
        fallback=model.fallback,
        overflow_at=model.overflow_at,
    )


def native(model: ModelSettings, name: str, endpoint: str, curve: CurveClient | None = None) -> NativeBackend:
    """The client of one replica's engine."""
    return NativeBackend(endpoint, name=name, curve=curve, silence_s=model.silence_s, max_in_flight=model.max_in_flight)


class Follower:
    """Makes a gateway's models those of its supervisor."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._models = {model.name: model for model in service.settings.models}

    async def follow(self, topology: Topology) -> None:
        for name in [name for name in self._models if name not in topology.models]:
            await self._remove(name)
        for name, replicas in topology.models.items():
            if name in self._models:
                await self._equip(self._models[name], replicas)
            elif name in topology.loaded:
                await self._add(ModelSettings.of(check_model(topology.loaded[name])), replicas)

    async def _equip(self, model: ModelSettings, replicas: Sequence[Replica]) -> None:
        """New replicas join, those that go get nothing new."""
        backend = self._service.registry.route(model.name).model.backend
        if not isinstance(backend, ReplicaSet):
            return
        wanted = {replica.name: replica.endpoint for replica in replicas}
        known = {member.name for member in backend.members if not member.retiring}
        for name in known - wanted.keys():
            backend.retire(name)
        for name in wanted.keys() - known:
            await backend.join(native(model, name, wanted[name]))

    async def _add(self, settings: ModelSettings, replicas: Sequence[Replica]) -> None:
        service = self._service
        endpoints = [replica.endpoint for replica in replicas]
        model = await asyncio.to_thread(served, service.settings, settings, endpoints)
        await model.backend.start()
        await service.admissions.add(model, settings.downgrade_to)
        service.prices.add(settings.price)
        service.registry.add(model)
        self._models[settings.name] = settings

    async def _remove(self, name: str) -> None:
        self._service.prices.remove(self._models.pop(name).price)
        model = self._service.registry.remove(name)
        if self._service.recall is not None:
            await self._service.recall.store.evict(model=name)
        self._service.in_background(self._see_off(model))

    async def _see_off(self, model: ServedModel) -> None:
        while model.backend.in_flight:  # noqa: ASYNC110 (it ends in many ways, none of which is an event)
            await asyncio.sleep(LOOK_S)
        await self._service.admissions.remove(model)
        await model.backend.close()
