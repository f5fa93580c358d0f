"""/v1/admin/models: models come and go while the server runs.

The supervisor carries it out, so it needs a server started by `penstock serve`. What is loaded here is there until it
is unloaded or the server stops; the configuration says what is there at its start.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from penstock.config.load import model_name
from penstock.gateway.api.admin.replicas import ask
from penstock.gateway.api.openai.models import describe
from penstock.gateway.app.decoding import decode
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.schemas import Name
from penstock.gateway.process.service import Service
from penstock.protocol.control import Load, Unload
from penstock.protocol.errors import InvalidRequest, NotFound


class ModelLoadRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/admin/models"""

    source: Annotated[str, Meta(min_length=1, max_length=4096)]
    name: Name | None = None
    """What clients call it; made from the source when not given."""
    options: dict[str, Any] = {}
    """Further keys of an entry of `models` in the configuration."""


_load = msgspec.json.Decoder(ModelLoadRequest)


async def admin_models(service: Service, exchange: Exchange) -> None:
    data = [
        {**describe(service, exchange.caller, model), "replicas": len(model.backend.replicas)}
        for model in service.registry
    ]
    for progress in service.control.loading.values() if service.control is not None else ():
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


async def load_model(service: Service, exchange: Exchange) -> None:
    """Answers when the model does, which may take as long as a download."""
    request = decode(_load, await exchange.body(service.settings.body_limit))
    name = request.name or model_name(request.source)
    if service.registry.named(name) or any(name in model.adapter_names for model in service.registry):
        raise InvalidRequest(f"`{name}` is already the name of a model.", param="name", code="name_taken")
    described = {**request.options, "source": request.source, "name": name}
    await ask(service, lambda number: Load(number, described))
    model = service.registry.route(name).model
    await model.backend.wait_ready(service.settings.engine_wait_s)
    await exchange.reply_json(describe(service, exchange.caller, model))


async def unload_model(service: Service, exchange: Exchange) -> None:
    """New requests do not find it any more; answers when what it ran has ended."""
    name = exchange.path.removeprefix("/v1/admin/models/")
    model = next((model for model in service.registry if model.name == name), None)
    if model is None:
        raise NotFound(f"No model that runs here is called `{name[:256]}`.", param="model")
    if model.time_slice:
        raise InvalidRequest(f"`{name}` takes turns with others (time_slice); it can be put to sleep.", param="model")
    needs = [other.name for other in service.registry if name in other.fallback]
    needs += [rules.name for rules in service.routes.rules.values() if name in (rules.small, rules.large)]
    needs += [other for other, smaller in service.admissions.smaller.items() if smaller == name]
    if needs:
        raise InvalidRequest(f"`{name}` is needed by {', '.join(f'`{other}`' for other in needs)}.", param="model")
    await ask(service, lambda number: Unload(number, name))
    await exchange.reply_json({"id": name, "object": "model", "deleted": True})
