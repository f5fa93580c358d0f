"""POST /v1/admin/models/{model}/sleep and /wake: models put to sleep and woken by hand."""

from __future__ import annotations

from penstock.gateway.app.exchange import Exchange
from penstock.gateway.process.service import Service
from penstock.protocol.errors import InvalidRequest
from penstock.routing.registry import ServedModel


async def sleep_model(service: Service, exchange: Exchange) -> None:
    model = _by_hand(service, exchange, "/sleep")
    await model.backend.sleep()
    await _reply(exchange, model)


async def wake_model(service: Service, exchange: Exchange) -> None:
    model = _by_hand(service, exchange, "/wake")
    await model.backend.wake()
    await _reply(exchange, model)


async def _reply(exchange: Exchange, model: ServedModel) -> None:
    await exchange.reply_json({"id": model.name, "object": "model", "state": model.backend.state})


def _by_hand(service: Service, exchange: Exchange, verb: str) -> ServedModel:
    """The model of a path, if it is for people to put to sleep and wake."""
    model = service.registry.route(exchange.path.removeprefix("/v1/admin/models/").removesuffix(verb)).model
    if model.adapter:
        raise InvalidRequest(f"`{model.name}` is an adapter; its base is `{model.base}`.", param="model")
    if model.time_slice:
        raise InvalidRequest(
            f"`{model.name}` takes turns (time_slice: {model.time_slice}): it sleeps and wakes by itself.",
            param="model",
            code="time_sliced",
        )
    return model
