"""/v1/admin/models: load and unload models at run time.

The supervisor does the work, so this needs a server started by `penstock serve`. A model that is loaded here is served
until it is unloaded or the server stops; the configuration lists the models at the start.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from penstock.config.load import model_name
from penstock.gateway.accounting.admission import Admissions
from penstock.gateway.api.admin.supervisor import Supervisor
from penstock.gateway.api.openai.models import ModelEndpoints
from penstock.gateway.app.decoding import decode
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.model_routes import Routes
from penstock.gateway.generation.schemas import Name
from penstock.protocol.control import LoadModel, UnloadModel
from penstock.protocol.errors import InvalidRequest, NotFound
from penstock.routing.registry import ModelRegistry


class ModelLoadRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/admin/models"""

    source: Annotated[str, Meta(min_length=1, max_length=4096)]
    name: Name | None = None
    """Its name for clients; derived from the source by default."""
    options: dict[str, Any] = {}
    """Further keys of an entry under `models` in the configuration."""


_load = msgspec.json.Decoder(ModelLoadRequest)


class ModelAdminEndpoints:
    """Loads and unloads models."""

    def __init__(
        self,
        registry: ModelRegistry,
        models: ModelEndpoints,
        routes: Routes,
        admissions: Admissions,
        supervisor: Supervisor,
        engine_wait_s: float,
        body_limit: int,
    ) -> None:
        self._registry = registry
        self._models = models
        self._routes = routes
        self._admissions = admissions
        self._supervisor = supervisor
        self._engine_wait_s = engine_wait_s
        self._body_limit = body_limit

    async def admin_models(self, exchange: Exchange) -> None:
        data = [
            {**self._models.describe(exchange.caller, model), "replicas": len(model.backend.replicas)}
            for model in self._registry
        ]
        for progress in self._supervisor.loading.values():
            data.append(
                {
                    "id": progress.model,
                    "object": "model",
                    "ready": False,
                    "state": "loading",
                    "phase": progress.phase,
                    "fraction": round(progress.fraction, 3),
                }
            )
        await exchange.reply_json({"object": "list", "data": data})

    async def load_model(self, exchange: Exchange) -> None:
        """Replies when the model is ready, which may take as long as a download."""
        request = decode(_load, await exchange.body(self._body_limit))
        name = request.name or model_name(request.source)
        if self._registry.named(name) or any(name in model.adapter_names for model in self._registry):
            raise InvalidRequest(f"`{name}` is already the name of a model.", param="name", code="name_taken")
        described = {**request.options, "source": request.source, "name": name}
        await self._supervisor.ask(lambda number: LoadModel(number, described))
        model = self._registry.route(name).model
        await model.backend.wait_ready(self._engine_wait_s)
        await exchange.reply_json(self._models.describe(exchange.caller, model))

    async def unload_model(self, exchange: Exchange) -> None:
        """New requests no longer find the model; replies when its running requests have ended."""
        name = exchange.path.removeprefix("/v1/admin/models/")
        model = next((model for model in self._registry if model.name == name), None)
        if model is None:
            raise NotFound(f"No model that runs here is called `{name[:256]}`.", param="model")
        if model.time_slice:
            raise InvalidRequest(
                f"`{name}` takes turns with others (time_slice); it can be put to sleep.", param="model"
            )
        needs = [other.name for other in self._registry if name in other.fallback]
        needs += [rules.name for rules in self._routes.rules.values() if name in (rules.small, rules.large)]
        needs += [other for other, smaller in self._admissions.smaller.items() if smaller == name]
        if needs:
            raise InvalidRequest(f"`{name}` is needed by {', '.join(f'`{other}`' for other in needs)}.", param="model")
        await self._supervisor.ask(lambda number: UnloadModel(number, name))
        await exchange.reply_json({"id": name, "object": "model", "deleted": True})
