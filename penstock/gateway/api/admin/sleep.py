"""POST /v1/admin/models/{model}/sleep and /wake: put models to sleep and wake them by hand."""

from __future__ import annotations

from penstock.gateway.app.exchange import Exchange
from penstock.protocol.errors import InvalidRequest
from penstock.routing.registry import ModelRegistry, ServedModel


class SleepEndpoints:
    """Puts models to sleep and wakes them."""

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry

    async def sleep_model(self, exchange: Exchange) -> None:
        model = self._by_hand(exchange, "/sleep")
        await model.backend.sleep()
        await _reply(exchange, model)

    async def wake_model(self, exchange: Exchange) -> None:
        model = self._by_hand(exchange, "/wake")
        await model.backend.wake()
        await _reply(exchange, model)

    def _by_hand(self, exchange: Exchange, verb: str) -> ServedModel:
        """The model of the path, if it may be put to sleep by hand."""
        model = self._registry.route(exchange.path.removeprefix("/v1/admin/models/").removesuffix(verb)).model
        if model.adapter:
            raise InvalidRequest(f"`{model.name}` is an adapter; its base is `{model.base}`.", param="model")
        if model.time_slice:
            raise InvalidRequest(
                f"`{model.name}` takes turns (time_slice: {model.time_slice}): it sleeps and wakes by itself.",
                param="model",
                code="time_sliced",
            )
        return model


async def _reply(exchange: Exchange, model: ServedModel) -> None:
    await exchange.reply_json({"id": model.name, "object": "model", "state": model.backend.state})
