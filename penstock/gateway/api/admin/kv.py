"""DELETE /v1/admin/kv: erase what a tenant's requests have left in the KV caches of engines, on disk too."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from penstock.gateway.app.decoding import decode_query
from penstock.gateway.app.exchange import Exchange
from penstock.identity.entities import DEFAULT_TENANT
from penstock.protocol.errors import InvalidRequest
from penstock.routing.registry import ModelRegistry, ServedModel

log = logging.getLogger(__name__)


class KVQuery(Struct, forbid_unknown_fields=True):
    tenant: str | UnsetType = UNSET
    """Empty: what callers without a key have left, and everybody where prefixes are shared."""
    model: str | None = None
    """Only on the engines of this model."""


class KVEndpoints:
    """Erases cached prefixes."""

    def __init__(self, registry: ModelRegistry, share_prefixes: bool) -> None:
        self._registry = registry
        self._share_prefixes = share_prefixes

    async def erase_kv(self, exchange: Exchange) -> None:
        asked = decode_query(KVQuery, exchange.scope)
        if asked.tenant is UNSET:
            raise InvalidRequest("`tenant` is needed: whose cached prefixes are to be erased.", param="tenant")
        if "\0" in asked.tenant:  # which ends the owner in a salt: it would be another tenant's name
            raise InvalidRequest("`tenant` is not the name of a tenant.", param="tenant")
        # Callers without a key are charged as the default tenant, and share prefixes that nobody else has.
        unowned = self._share_prefixes or asked.tenant == DEFAULT_TENANT
        owners = dict.fromkeys([asked.tenant, ""] if unowned else [asked.tenant])
        models = self._models(asked.model)
        engines: dict[tuple[str, str], dict[str, Any]] = {}
        for owner in owners:
            erasures = await asyncio.gather(*(model.backend.erase(owner) for model in models))
            for model, found in zip(models, erasures, strict=True):
                for replica, erased in found.items():
                    new = {"model": model.name, "replica": replica, "blocks": 0, "failed": 0}
                    entry = engines.setdefault((model.name, replica), new)
                    entry["blocks"] += erased.blocks
                    entry["failed"] += erased.failed
                    if erased.error:
                        entry["error"] = erased.error
        entries = list(engines.values())
        complete = not any(entry["failed"] or "error" in entry for entry in entries)
        log.info("erased KV blocks", extra={"tenant": asked.tenant, "complete": complete})
        await exchange.reply_json(
            {
                "object": "kv.erased",
                "tenant": asked.tenant,
                "shared": self._share_prefixes,
                "complete": complete,
                "data": entries,
            }
        )

    def _models(self, name: str | None) -> list[ServedModel]:
        if name is None:
            return [model for model in self._registry if isinstance(model, ServedModel) and not model.adapter]
        if self._registry.remote(name) is not None:
            raise InvalidRequest(f"`{name}` runs on another server, whose caches are its own.", param="model")
        model = self._registry.route(name).model
        if model.adapter:
            raise InvalidRequest(f"`{model.name}` is an adapter; its base is `{model.base}`.", param="model")
        return [model]
