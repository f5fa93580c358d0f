"""/v1/admin/adapters: load, pin and unload LoRA adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.engine.adapters.spec import AdapterSpec, AdapterStatus, name_problem
from penstock.gateway.app.decoding import decode
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.schemas import Name
from penstock.protocol.errors import InvalidRequest, NotFound
from penstock.routing.registry import ModelRegistry, ServedModel


class AdapterLoadRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/admin/adapters"""

    name: Name
    source: Annotated[str, Meta(min_length=1, max_length=4096)]
    model: Name | None = None
    """The model it adapts; required where several models are served."""
    pinned: bool = False
    owner: Annotated[str, Meta(max_length=128)] | UnsetType = UNSET
    """The tenant that alone may use it, by default that of the caller's key; empty: all tenants."""


class AdapterPinRequest(Struct, forbid_unknown_fields=True):
    """PATCH /v1/admin/adapters/{name}"""

    pinned: bool


_load = msgspec.json.Decoder(AdapterLoadRequest)
_pin = msgspec.json.Decoder(AdapterPinRequest)


class AdapterEndpoints:
    """LoRA adapters of the models that run here."""

    def __init__(
        self,
        registry: ModelRegistry,
        forget_answers: Callable[[str], Awaitable[object]],
        engine_wait_s: float,
        body_limit: int,
    ) -> None:
        self._registry = registry
        self._forget_answers = forget_answers
        self._engine_wait_s = engine_wait_s
        self._body_limit = body_limit

    async def list_adapters(self, exchange: Exchange) -> None:
        found = [
            describe(model, status) for model in self._registry for status in (model.backend.adapters or {}).values()
        ]
        await exchange.reply_json({"object": "list", "data": found})

    async def load_adapter(self, exchange: Exchange) -> None:
        request = decode(_load, await exchange.body(self._body_limit))
        problem = name_problem(request.name)
        if problem is not None:
            raise InvalidRequest(f"Invalid `name`: {problem}.", param="name")
        model = self._base(request.model)
        base = next((other for other in self._registry if request.name in other.adapter_names), model)
        if self._registry.named(request.name) or base is not model:
            raise InvalidRequest(
                f"`{request.name}` is already the name of another model.", param="name", code="name_taken"
            )
        await model.backend.wait_ready(self._engine_wait_s)
        spec = AdapterSpec(request.name, request.source, request.pinned, self._owner_of(exchange, model, request))
        status = await model.backend.load_adapter(spec)
        if model.adapter_texts is not None:
            await model.adapter_texts.prepare(request.source)
        await self._forget_answers(request.name)
        await exchange.reply_json(describe(model, status))

    async def pin_adapter(self, exchange: Exchange) -> None:
        request = decode(_pin, await exchange.body(self._body_limit))
        model, name = self._adapted(exchange)
        await exchange.reply_json(describe(model, await model.backend.pin_adapter(name, request.pinned)))

    async def unload_adapter(self, exchange: Exchange) -> None:
        model, name = self._adapted(exchange)
        await self._unload(model, name)
        await exchange.reply_json({"id": name, "object": "adapter", "deleted": True})

    async def delete_model(self, exchange: Exchange) -> None:
        """The same as clients of OpenAI's API ask for it: there, what can be deleted is a fine-tuned model."""
        name = exchange.path.removeprefix("/v1/models/")
        if any(model.name == name for model in self._registry):
            raise InvalidRequest(
                f"`{name}` is no adapter. DELETE /v1/admin/models/{name} unloads a model.", param="model"
            )
        await self._unload(*self._adapter(name))
        await exchange.reply_json({"id": name, "object": "model", "deleted": True})

    async def _unload(self, model: ServedModel, name: str) -> None:
        await model.backend.unload_adapter(name)
        await self._forget_answers(name)

    def _owner_of(self, exchange: Exchange, model: ServedModel, request: AdapterLoadRequest) -> str:
        """What the configuration says, or the request; a reload that says nothing keeps the owner."""
        known = model.adapter_owner(request.name)
        configured = model.adapter_owners.get(request.name)
        if configured and request.owner not in (UNSET, configured):
            raise InvalidRequest(
                f"The configuration says that `{request.name}` belongs to `{configured}`.", param="owner"
            )
        if isinstance(request.owner, str):
            return request.owner
        return known if request.name in model.adapter_names else exchange.caller.tenant if exchange.caller.key else ""

    def _base(self, name: str | None) -> ServedModel:
        if name is not None:
            model = self._registry.route(name).model
            if model.adapter:
                raise InvalidRequest(f"`{name}` is itself an adapter.", param="model")
            return model
        models = list(self._registry)
        if len(models) > 1:
            raise InvalidRequest(
                "Several models are served here; name the one that it adapts in `model`.", param="model"
            )
        return models[0]

    def _adapted(self, exchange: Exchange) -> tuple[ServedModel, str]:
        return self._adapter(exchange.path.removeprefix("/v1/admin/adapters/"))

    def _adapter(self, name: str) -> tuple[ServedModel, str]:
        for model in self._registry:
            if name in model.adapter_names:
                return model, name
        raise NotFound(f"No adapter is called `{name[:256]}`.", param="name")


def describe(model: ServedModel, status: AdapterStatus) -> dict[str, Any]:
    fields = dataclasses.asdict(status)
    name = fields.pop("name")
    return {"id": name, "object": "adapter", "model": model.name, **fields, "owner": model.adapter_owner(name) or None}
