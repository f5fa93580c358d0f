"""GET /v1/models and /v1/models/{model}"""

from __future__ import annotations

from typing import Any

from penstock.backends.embedder import Embedder
from penstock.gateway.accounting.quotas import Quotas
from penstock.gateway.accounting.request_limits import CapName
from penstock.gateway.api.anthropic.models import model_info, page
from penstock.gateway.app.dialect_choice import from_anthropic
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.model_routes import Routes
from penstock.gateway.generation.permissions import Permissions
from penstock.identity import Caller
from penstock.routing.encoders import Encoders
from penstock.routing.registry import ModelRegistry, ServedModel
from penstock.routing.remotes import RemoteModel
from penstock.routing.selection.selector import RouteRules


class ModelEndpoints:
    """Describes models, encoders and routes."""

    def __init__(
        self,
        registry: ModelRegistry,
        permissions: Permissions,
        encoders: Encoders,
        routes: Routes,
        quotas: Quotas,
        max_tokens: int | None,
    ) -> None:
        self._registry = registry
        self._permissions = permissions
        self._encoders = encoders
        self._routes = routes
        self._quotas = quotas
        self._max_tokens = max_tokens

    async def list_models(self, exchange: Exchange) -> None:
        caller, permissions = exchange.caller, self._permissions
        here = [model for model in self._registry if model.allowed(caller.access)]
        adapted = [adapter for model in self._registry for adapter in model.adapted(caller.access)]
        data = [self.describe(caller, model) for model in (*here, *adapted)]
        data += [
            self.describe_remote(caller, remote)
            for remote in self._registry.remotes.values()
            if remote.allowed(caller.access)
        ]
        data += [self.describe_encoder(caller, encoder) for encoder in self._encoders.allowed(caller.access)]
        data += [
            self.describe_route(caller, rules)
            for rules in self._routes.rules.values()
            if permissions.exists(caller, rules.name)
        ]
        data += [
            self.describe_stand_in(caller, name)
            for name in self._registry.stand_ins
            if permissions.exists(caller, name)
        ]
        listing = page(exchange, data) if from_anthropic(exchange) else {"object": "list", "data": data}
        await exchange.reply_json(listing)

    async def get_model(self, exchange: Exchange) -> None:
        anthropic = from_anthropic(exchange)
        name = exchange.path.removeprefix("/v1/models/")
        if self._permissions.exists(exchange.caller, name):
            await self._registry.prepare(name)
        found = self._described(exchange.caller, name)
        await exchange.reply_json(model_info(found) if anthropic else found)

    def _described(self, caller: Caller, name: str) -> dict[str, Any]:
        if name in self._encoders and self._encoders.allows(caller.access, name):
            return self.describe_encoder(caller, self._encoders.find(name))
        if not self._permissions.exists(caller, name):
            raise self._permissions.unknown(caller, name)
        if name in self._routes.rules:
            return self.describe_route(caller, self._routes.rules[name])
        if name in self._registry.stand_ins:
            return self.describe_stand_in(caller, name)
        remote = self._registry.remote(name)
        if remote is not None:
            return self.describe_remote(caller, remote)
        return self.describe(caller, self._registry.route(name).model)

    def describe(self, caller: Caller, model: ServedModel) -> dict[str, Any]:
        """`context_window` is the model's; the part that the caller may use is in `limits` and `max_output_tokens`."""
        window = model.context_window
        caps = [cap for cap in (window, self._max_tokens, *self._caps(caller, model.base_name)) if cap]
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "penstock",
            "root": model.base_name,
            "parent": model.base or None,
            "aliases": list(model.aliases),
            "context_window": window,
            "max_model_len": window,
            "vocab_size": model.text.vocab_size,
            "max_output_tokens": min(caps, default=None),
            "limits": self._quotas.describe(caller),
            "sampling": model.sampling.given,
            "runs_through": info.runs_through or "penstock" if (info := model.backend.info) is not None else None,
            "ready": model.backend.ready,
            "state": model.state,
            "capabilities": {
                "chat": model.text.has_chat_template,
                "completions": True,
                "streaming": True,
                "logprobs": True,
                "tools": model.text.has_chat_template,
                "structured_output": True,
            },
            "pricing": self._quotas.pricing(caller, model.base_name, model.adapter),
        }

    def _caps(self, caller: Caller, model: str) -> list[int]:
        """What the caller's limits leave of an answer."""
        names: tuple[CapName, ...] = ("context_tokens", "output_tokens")
        found = (self._quotas.requests.cap(caller, name, model) for name in names)
        return [cap.most for cap in found if cap is not None]

    def describe_remote(self, caller: Caller, model: RemoteModel) -> dict[str, Any]:
        """A model on another server, whose address clients do not see."""
        window = model.context_window
        caps = [cap for cap in (window, self._max_tokens, *self._caps(caller, model.name)) if cap]
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "remote",
            "root": model.name,
            "parent": None,
            "aliases": list(model.aliases),
            "context_window": window,
            "max_model_len": window,
            "max_output_tokens": min(caps, default=None),
            "limits": self._quotas.describe(caller),
            "ready": model.ready,
            "saturated": all(model.saturated(member) for member in model.members),
            "state": "awake" if model.ready else "away",
            "capabilities": _abilities(model),
            "tokenizer": "configured" if model.text else "server" if model.supports("tokenize") else "estimate",
            "pricing": self._quotas.pricing(caller, model.name),
        }

    def describe_encoder(self, caller: Caller, embedder: Embedder) -> dict[str, Any]:
        """An encoder; some facts are known only once it has been started."""
        config, info = self._encoders.configs[embedder.name], embedder.backend.info
        scores = None if info is None else info.scores
        return {
            "id": embedder.name,
            "object": "model",
            "created": self._encoders.created,
            "owned_by": "penstock",
            "aliases": list(config.aliases),
            "context_window": None if info is None else info.max_model_len,
            "limits": self._quotas.describe(caller),
            "dimensions": None if info is None or info.scores else info.dimensions,
            "ready": embedder.up,
            "state": "awake" if embedder.up else "started when asked for",
            "capabilities": {"embeddings": scores is not True, "rerank": True},
            "pricing": {"input_per_million": config.input_price},
        }

    def describe_stand_in(self, caller: Caller, name: str) -> dict[str, Any]:
        """The name of an experiment, described as its control; clients do not see its arms."""
        remote = self._registry.remote(name)
        if remote is not None:
            return {**self.describe_remote(caller, remote), "id": name, "aliases": []}
        return {**self.describe(caller, self._registry.route(name).model), "id": name, "aliases": []}

    def describe_route(self, caller: Caller, rules: RouteRules) -> dict[str, Any]:
        """A route: a name that stands for one of two models, or for the one that exists for the caller."""
        models = [name for name in (rules.small, rules.large) if self._permissions.exists(caller, name)]
        here = [self._registry.route(name).model for name in models if self._registry.remote(name) is None]
        there = [remote for name in models if (remote := self._registry.remote(name)) is not None]
        known = [model.context_window for model in here] + [remote.context_window for remote in there]
        windows = [window for window in known if window is not None]
        return {
            "id": rules.name,
            "object": "model",
            "created": here[0].created if here else 0,
            "owned_by": "penstock",
            "routes_to": models,
            "context_window": min(windows, default=None),
            "ready": all(model.backend.ready for model in here) and all(remote.ready for remote in there),
            "state": "on" if rules.enabled else "off",
            "capabilities": {
                "chat": all(model.text.has_chat_template for model in here),
                "completions": all(remote.supports("completions") for remote in there),
            },
        }


def _abilities(model: RemoteModel) -> dict[str, bool]:
    """What a remote model can do, as far as the API of its servers goes."""
    if model.kind != "chat":
        return {"embeddings": model.kind == "embedding", "rerank": True}
    return {
        "chat": model.supports("chat"),
        "completions": model.supports("completions"),
        "streaming": True,
        "logprobs": model.supports("logprobs"),
        "tools": model.supports("tools"),
        "structured_output": model.supports("response_format"),
    }
