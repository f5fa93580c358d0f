"""A gateway follows a model whose settings change while it is served: names, prices, pools and their queues."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.routing import AdmissionConfig
from penstock.gateway.accounting.admission import Admissions
from penstock.gateway.app.background import BackgroundTasks
from penstock.gateway.process.model_follower import ModelFollower
from penstock.gateway.process.settings import GatewaySettings, ModelSettings
from penstock.metering.prices import PriceBook
from penstock.protocol.control import Topology
from penstock.protocol.errors import ModelNotFound
from penstock.routing.place import ReplicaPlace
from penstock.routing.placement import PlacementFacts
from penstock.routing.registry import ModelRegistry, ServedModel
from penstock.routing.replicas import ReplicaSet
from penstock.telemetry.metrics import Metrics
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from tests.gateway.conftest import text
from tests.scripted import ScriptedEngine

__all__ = ["text"]


async def test_settings_that_change_while_a_model_is_served(text: TextModel) -> None:
    backend = ReplicaSet("tiny", [InProcessBackend(ScriptedEngine(text))], places={"0": ReplicaPlace("chat")})
    model = ServedModel("tiny", text, backend, aliases=("small",), created=7)
    registry = ModelRegistry([model])
    settings = GatewaySettings(models=(ModelSettings("tiny", "", aliases=("small",)),))
    prices = PriceBook([settings.models[0].price])
    background = BackgroundTasks()
    admissions = Admissions(AdmissionConfig(), (), {}, registry, Metrics(lambda: ()))
    await admissions.start()

    async def forget(name: str) -> None:
        raise AssertionError("no answer is forgotten")

    follower = ModelFollower(settings, registry, admissions, prices, forget, background)

    async def follow(**described: Any) -> dict[str, str]:
        return await follower.follow(Topology({"tiny": []}, {"tiny": {"name": "tiny", "source": "x", **described}}))

    try:
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
    finally:
        await background.close()
        await admissions.close()
