"""/v1/tools: the tools that requests may name in `server_tools`. /v1/admin/tools: register and remove tool servers."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec

from penstock.errors import ConfigError
from penstock.gateway.app.decoding import decode
from penstock.gateway.app.exchange import Exchange
from penstock.protocol.errors import InvalidRequest, NotFound, ServiceUnavailable, sentence
from penstock.storage import DatabaseError
from penstock.tools.execution import Function, ToolError, ToolRegistry
from penstock.tools.execution.specs import ToolSpec

T = TypeVar("T")
_decoder = msgspec.json.Decoder(ToolSpec)


class ToolEndpoints:
    """Tools that this gateway runs."""

    def __init__(self, registry: ToolRegistry, body_limit: int) -> None:
        self._registry = registry
        self._body_limit = body_limit

    async def list_tools(self, exchange: Exchange) -> None:
        found = await self._registry.available(exchange.caller.access)
        data = [
            {"object": "tool_server", "name": name, "functions": [_described(function) for function in functions]}
            for name, functions in found.items()
        ]
        await exchange.reply_json({"object": "list", "data": data})

    async def list_tool_servers(self, exchange: Exchange) -> None:
        found = await self._registry.specs()
        data = [{**spec.described(), "from": "api" if stored else "configuration"} for spec, stored in found]
        await exchange.reply_json({"object": "list", "data": data})

    async def register_tool_server(self, exchange: Exchange) -> None:
        spec = decode(_decoder, await exchange.body(self._body_limit))
        functions = await _guard(self._changeable().register(spec))
        described = {**spec.described(), "functions": [_described(function) for function in functions]}
        await exchange.reply_json({**described, "from": "api"})

    async def remove_tool_server(self, exchange: Exchange) -> None:
        name = exchange.path.rpartition("/")[2]
        if not await _guard(self._changeable().remove(name)):
            raise NotFound(f"No tool server called `{name[:64]}` was registered through this API.")
        await exchange.reply_json({"name": name, "object": "tool_server", "deleted": True})

    def _changeable(self) -> ToolRegistry:
        if self._registry.store is None:
            raise ServiceUnavailable("This gateway runs without a store for tools.")
        return self._registry


def _described(function: Function) -> dict[str, Any]:
    return {"name": function.name, "description": function.description, "parameters": function.parameters}


async def _guard(work: Awaitable[T]) -> T:
    try:
        return await work
    except (ToolError, ConfigError) as error:
        raise InvalidRequest(sentence(error)) from error
    except DatabaseError as error:
        raise ServiceUnavailable("The tool store is unavailable at the moment.") from error
