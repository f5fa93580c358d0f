"""A gateway follows a model whose settings change while it is served: names, prices, pools and their queues."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.config.routing import AdmissionConfig
from penstock.gateway.accounting.admission import Admissions
from penstock.gateway.app.background import BackgroundTasks
from penstock.gateway.process.model_follower import ModelFollower
from penstock.gateway.process.settings import GatewaySettings, ModelSettings
from penstock.identity.labels import Labels, demand_of
from penstock.metering.prices import PriceBook
from penstock.protocol.control import Replica, Topology
from penstock.protocol.errors import ModelNotFound
from penstock.routing.place import ReplicaPlace
from penstock.routing.placement import PlacementFacts, Placer
from penstock.routing.registry import ModelRegistry, ServedModel
from penstock.routing.replicas import ReplicaSet
from penstock.telemetry.metrics import Metrics
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from tests.gateway.conftest import text
from tests.scripted import ScriptedEngine

__all__ = ["text"]


@dataclass
class World:
    registry: ModelRegistry
    admissions: Admissions
    follower: ModelFollower

    async def follow(self, *replicas: Replica, **described: Any) -> dict[str, str]:
        described = {"name": "tiny", "source": "x", **described}
        return await self.follower.follow(Topology({"tiny": list(replicas)}, {"tiny": described}))


@asynccontextmanager
async def following(model: ServedModel, settings: ModelSettings) -> AsyncIterator[World]:
    registry = ModelRegistry([model])
    background = BackgroundTasks()
    admissions = Admissions(AdmissionConfig(), (), {}, registry, Metrics(lambda: ()))
    await admissions.start()

    async def forget(name: str) -> None:
        raise AssertionError("no answer is forgotten")

    own = GatewaySettings(models=(settings,))
    prices = PriceBook([settings.price])
    try:
        yield World(registry, admissions, ModelFollower(own, registry, admissions, prices, forget, background))
    finally:
        await background.close()
        await admissions.close()


async def test_settings_that_change_while_a_model_is_served(text: TextModel) -> None:
    backend = ReplicaSet("tiny", [InProcessBackend(ScriptedEngine(text))], places={"0": ReplicaPlace("chat")})
    model = ServedModel("tiny", text, backend, aliases=("small",), created=7)
    async with following(model, ModelSettings("tiny", "", aliases=("small",))) as it:
        registry, admissions, follow = it.registry, it.admissions, it.follow
        # The gateway's own configuration holds until the fleet's description changes.
        assert await follow() == {} and registry.route("small").model is model
        pools = [{"name": "chat"}, {"name": "batch", "autoscale": {"min": 1, "max": 2}}]
        rules = [{"pool": "batch", "classes": ["batch"], "tiers": ["unknown here"]}, {"pool": "chat"}]
        changed = {"aliases": ["little"], "input_price": 2.0, "pools": pools, "pool_rules": rules, "fallback": ["far"]}
        assert await follow(**changed) == {}
        assert registry.route("little").model is model and model.created == 7
        with pytest.raises(ModelNotFound):
            registry.route("small")
        assert (model.input_price, model.fallback, model.autoscaled_pools) == (2.0, ("far",), ("batch",))
        assert backend.placer.place(PlacementFacts()).pools == ("chat",)
        assert admissions.pool_load(model, "batch") == (0, 0.0, False)
        assert model.source == "" and await follow(**changed) == {}
        # Names that others have are refused, and the model is served as before.
        registry.add(ServedModel("other", text, ReplicaSet("other", [])))
        assert "two models are called" in (await follow(**{**changed, "aliases": ["other"]}))["tiny"]
        assert registry.route("little").model is model


async def test_replicas_are_where_the_labels_of_their_model_say_until_they_say_it_themselves(text: TextModel) -> None:
    def regions() -> list[str]:
        return [member.place.region for member in backend.members]

    def served(region: str) -> bool:
        return not backend.unmet(demand_of([("region", region)], "a tenant"))

    labels = (("region", "eu"),)
    replica = InProcessBackend(ScriptedEngine(text))
    backend = ReplicaSet("tiny", [replica], placer=Placer(labels=Labels(labels)))
    async with following(ServedModel("tiny", text, backend), ModelSettings("tiny", "", labels=labels)) as it:
        here = Replica(replica.name, "ipc://engine")
        assert await it.follow(here, labels={"region": "eu"}) == {}
        assert regions() == ["eu"] and served("eu") and not served("us")
        assert await it.follow(here, labels={"region": "ch"}) == {}
        assert regions() == ["ch"] and served("ch") and not served("eu")
        assert await it.follow(Replica(replica.name, "ipc://engine", region="us"), labels={"region": "ch"}) == {}
        assert regions() == ["us"] and served("us")
