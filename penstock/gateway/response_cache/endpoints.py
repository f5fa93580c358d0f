"""GET and DELETE /v1/cache, and the same for all tenants under /v1/admin/cache."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from penstock.gateway.app.decoding import decode_query
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.permissions import Permissions
from penstock.gateway.response_cache.cache import ResponseCache
from penstock.protocol.errors import InvalidRequest


class CacheQuery(Struct, forbid_unknown_fields=True):
    model: str | None = None
    """Only answers of this model."""


class AdminCacheQuery(Struct, forbid_unknown_fields=True):
    tenant: str | None = None
    model: str | None = None


class CacheEndpoints:
    """The cached answers of a tenant, and of all tenants."""

    def __init__(self, cache: ResponseCache, permissions: Permissions) -> None:
        self._cache = cache
        self._permissions = permissions

    async def show_cache(self, exchange: Exchange) -> None:
        await exchange.reply_json(await _described(self._cache, exchange.caller.tenant))

    async def evict_cache(self, exchange: Exchange) -> None:
        asked = decode_query(CacheQuery, exchange.scope)
        if asked.model is not None and not self._permissions.sees(exchange.caller, asked.model):
            await exchange.reply_json({"object": "cache.evicted", "answers": 0})
            return
        await self._evict(exchange, exchange.caller.tenant, asked.model)

    async def show_all_caches(self, exchange: Exchange) -> None:
        asked = decode_query(AdminCacheQuery, exchange.scope)
        if asked.model is not None:
            raise InvalidRequest("Sizes are known per tenant, not per model.", param="model")
        await exchange.reply_json(await _described(self._cache, asked.tenant))

    async def evict_all_caches(self, exchange: Exchange) -> None:
        asked = decode_query(AdminCacheQuery, exchange.scope)
        await self._evict(exchange, asked.tenant, asked.model)

    async def _evict(self, exchange: Exchange, tenant: str | None, model: str | None) -> None:
        gone = await self._cache.store.evict(tenant, model)
        await exchange.reply_json({"object": "cache.evicted", "answers": gone})


async def _described(cache: ResponseCache, tenant: str | None) -> dict[str, Any]:
    size = await cache.store.size(tenant)
    config = cache.config
    return {
        "object": "cache",
        "exact": config.exact,
        "semantic": config.semantic,
        "shared": bool(config.url),
        "ttl_s": config.ttl_s,
        "answers": size.answers,
        "bytes": size.bytes,
    }
