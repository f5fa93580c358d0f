"""/v1/admin/routes: list routes, turn them on and off, change their share."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from penstock.gateway.app.decoding import decode
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.model_routes import Routes
from penstock.protocol.errors import InvalidRequest, NotFound, ServiceUnavailable
from penstock.routing.selection.selector import RouteRules
from penstock.storage import DatabaseError


class RouteSwitch(Struct, forbid_unknown_fields=True, kw_only=True):
    """PATCH /v1/admin/routes/{name}"""

    enabled: bool | None = None
    share: Annotated[float, Meta(ge=0, le=1)] | None = None


_switch = msgspec.json.Decoder(RouteSwitch)


class RouteEndpoints:
    """Routes and their switches."""

    def __init__(self, routes: Routes, body_limit: int) -> None:
        self._routes = routes
        self._body_limit = body_limit

    async def list_routes(self, exchange: Exchange) -> None:
        await exchange.reply_json(
            {"object": "list", "data": [described(rules) for rules in self._routes.rules.values()]}
        )

    async def switch_route(self, exchange: Exchange) -> None:
        request = decode(_switch, await exchange.body(self._body_limit))
        name: str = exchange.scope["path_params"]["route"]
        if name not in self._routes.rules:
            raise NotFound(f"There is no route `{name[:128]}`.")
        if request.enabled is None and request.share is None:
            raise InvalidRequest("Say what to change: `enabled`, `share` or both.")
        try:
            changed = await self._routes.switch(name, enabled=request.enabled, share=request.share)
        except DatabaseError as error:
            raise ServiceUnavailable("The switch cannot be stored at the moment.") from error
        await exchange.reply_json(described(changed))


def described(rules: RouteRules) -> dict[str, Any]:
    fields = dataclasses.asdict(rules)
    return {"id": fields.pop("name"), "object": "route", **fields}
