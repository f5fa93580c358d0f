"""From the model a request names to an engine that is up, with the headers that say so."""

from __future__ import annotations

from penstock.engine.request import EngineInfo
from penstock.gateway.exchange import Exchange
from penstock.gateway.service import Service
from penstock.routing.registry import ServedModel


async def open_route(service: Service, exchange: Exchange, name: str) -> tuple[ServedModel, EngineInfo]:
    """The model, once its engine is up and, if it takes turns, awake; waits for each up to `engine_wait_s`."""
    model = find_model(service, exchange, name)
    within = service.settings.engine_wait_s
    info = await model.backend.wait_ready(within)
    exchange.release = await service.slices.acquire(model, within)
    # One that woke for the first time knows more of itself now.
    return model, model.backend.info or info


def find_model(service: Service, exchange: Exchange, name: str) -> ServedModel:
    route = service.registry.route(name)
    model = route.model
    exchange.record.model_version = model.base_name
    exchange.record.adapter_id = model.adapter or None
    exchange.extra_headers += [
        (b"x-penstock-model", model.name.encode("latin-1", "replace")),
        (b"x-penstock-route", route.why.encode()),
        (b"x-penstock-replica", model.backend.name.encode("latin-1", "replace")),
    ]
    return model
