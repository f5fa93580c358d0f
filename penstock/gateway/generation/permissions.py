"""May this request reach this model? The one place that answers, for every path that leads to one: the name in the
request, routes, fallbacks, overflow, downgrades, guardrails, the judge, summaries, tools, batches.

Invariants: what a caller may not use does not exist for it. The error for such a name is made by the same code as that
for a name nobody has, and lists only what the caller may use. What exists but lacks a label that the request demands
never gets the request's data: that is a 403 with the rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.gateway.accounting.attribution import note_model
from penstock.gateway.accounting.metered import ModelName
from penstock.gateway.app.data_rules import permit, withheld
from penstock.gateway.app.exchange import Exchange
from penstock.identity import Caller
from penstock.identity.access import Kind
from penstock.identity.labels import Requirement
from penstock.protocol.errors import ModelNotFound
from penstock.routing.encoders import Encoders
from penstock.routing.registry import AnsweringModel, ModelRegistry, ServedModel
from penstock.routing.remotes import RemoteModel


class Permissions:
    """What exists for the callers of a gateway."""

    def __init__(self, registry: ModelRegistry, encoders: Encoders | None = None) -> None:
        self._registry = registry
        self._encoders = encoders
        self._routes: dict[str, tuple[str, ...]] = {}

    def add_route(self, name: str, models: Sequence[str]) -> None:
        """`name` stands for `models`, one of which answers. It exists for callers that may use it and one of them."""
        self._routes[name] = tuple(models)

    def exists(self, caller: Caller, name: str) -> bool:
        """Whether a model, alias, adapter, remote or route called `name` exists for a caller."""
        models = self._routes.get(name)
        if models is None:
            return self._registry.allows(caller.access, name)
        return caller.access.allows("model", name) and any(self.exists(caller, model) for model in models)

    def check(self, exchange: Exchange, name: str) -> None:
        """Raises `ModelNotFound` or `DataRuleForbids` unless a request may reach what is called `name`."""
        self.check_exists(exchange, name)
        if exchange.demand:
            permit(exchange, "model", name, self.unmet(exchange, name))

    def check_exists(self, exchange: Exchange, name: str) -> None:
        """Raises `ModelNotFound` unless what is called `name` exists for the caller. Who answers is not decided yet."""
        if not self.exists(exchange.caller, name):
            raise self.unknown(exchange.caller, name)

    def counted_as(self, exchange: Exchange, name: str) -> ModelName | None:
        """The model whose limits a request to `name` counts against; None: that depends on which of several answers.
        Raises `ModelNotFound` where nothing of this name exists for the caller."""
        self.check_exists(exchange, name)
        found = None if name in self._routes else self._registry.find(name)
        if found is None:
            return None
        model = found if isinstance(found, RemoteModel) else found.model
        return ModelName(model.base_name, model.adapter)

    def unmet(self, exchange: Exchange, name: str) -> list[Requirement]:
        """What the request demands and what is called `name` meets nowhere; empty: it may get the request."""
        demand = exchange.demand
        if not demand:
            return []
        models = self._routes.get(name)
        if models is not None:
            return min((self.unmet(exchange, model) for model in models), key=len)
        found = self._registry.find(name)
        if found is None:
            return list(demand.requirements)
        return (found if isinstance(found, RemoteModel) else found.model).unmet(demand)

    def gate(self, exchange: Exchange, model: AnsweringModel, kind: str = "model") -> None:
        """Called right before a model gets data of the request, which guardrails may have marked since it was
        chosen."""
        if exchange.demand:
            permit(exchange, kind, model.name, model.unmet(exchange.demand))

    def unknown(self, caller: Caller, name: str) -> ModelNotFound:
        """The error for a name that does not exist for a caller."""
        routes = [route for route in self._routes if self.exists(caller, route)]
        return ModelNotFound(name[:256], [*self._registry.names(caller.access), *routes])

    def sees(self, caller: Caller, name: str) -> bool:
        """Whether a caller may be shown the name of a model that answered once, which may be gone since."""
        if not name:
            return True
        if self._registry.find(name) is not None or name in self._routes:
            return self.exists(caller, name)
        if self._encoders is not None and name in self._encoders:
            return self._encoders.allows(caller.access, name)
        kinds: tuple[Kind, ...] = ("model", "adapter", "remote")
        return any(caller.access.allows(kind, name) for kind in kinds)

    def sees_answer(self, caller: Caller, model: str | None, adapter: str | None) -> bool:
        """The same for what answered a request, as records name it. Operators see everything."""
        return "admin" in caller.scopes or self.sees(caller, adapter or model or "")

    def remote(self, exchange: Exchange, name: str) -> RemoteModel | None:
        """The model that other servers run under `name`, if it exists for the caller; None: there is none."""
        remote = self._registry.remote(name)
        if remote is None or not self.exists(exchange.caller, name):
            return None
        note_model(exchange, name, remote.name, "direct" if name == remote.name else "alias")
        return remote

    async def find(self, exchange: Exchange, name: str) -> ServedModel:
        """The model that runs here under `name`, for a request that needs its tokenizer only."""
        if name in self._routes and name not in self._registry.stand_ins:
            raise self.unknown(exchange.caller, name)
        self.check_exists(exchange, name)
        await self._registry.prepare(name)
        route = self._registry.route(name)
        model = route.model
        note_model(exchange, name, model.name, route.why, base_name=model.base_name, adapter=model.adapter)
        return model

    def allows(self, exchange: Exchange, name: str, *, for_all: bool = False) -> bool:
        """Whether a request may reach what is called `name`. `for_all`: the operator has it read what any caller
        sends, whether or not they may use it themselves. What a data rule leaves out is noted."""
        if not for_all and not self.exists(exchange.caller, name):
            return False
        return not withheld(exchange, "model", name, self.unmet(exchange, name))

    def allowed(self, exchange: Exchange, names: Iterable[str]) -> list[str]:
        """Those of `names` that a request may reach, in the same order."""
        return [name for name in names if self.allows(exchange, name)]

    def usual(self, exchange: Exchange) -> str:
        """The name of the model that answers a request which names none, as clients of servers with one model send
        it: the first that runs here, or else the first of another server."""
        for name in (model.name for model in self._registry):
            if self.allows(exchange, name):
                return name
        for remote in self._registry.remotes.values():
            if remote.kind == "chat" and self.allows(exchange, remote.name):
                return remote.name
        raise self.unknown(exchange.caller, "")

    def first(self, exchange: Exchange) -> ServedModel:
        """The model of a request that names none: the first that it may reach."""
        for model in self._registry:
            if self.allows(exchange, model.name):
                return model
        raise self.unknown(exchange.caller, "")
