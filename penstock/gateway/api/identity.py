"""/v1/admin/tenants and /v1/admin/keys: the same store as `penstock keys`, for keys with the scope `admin`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from penstock.gateway.decoding import decode
from penstock.gateway.exchange import Exchange
from penstock.gateway.service import Service
from penstock.identity import IdentityStore, Key, Scope, Tenant
from penstock.identity.store import IdentityError
from penstock.protocol.errors import InvalidRequest, KeyStoreUnavailable, NotFound
from penstock.storage import DatabaseError


class TenantRequest(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    name: str = ""
    tier: str = ""


class TenantChange(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None
    tier: str | None = None
    disabled: bool | None = None


class KeyRequest(msgspec.Struct, forbid_unknown_fields=True):
    tenant: str
    user: str = ""
    name: str = ""
    scopes: list[Scope] = msgspec.field(default_factory=lambda: ["inference"])
    expires_at: float | None = None
    """Seconds since 1970; null: never."""


_tenant_request = msgspec.json.Decoder(TenantRequest)
_tenant_change = msgspec.json.Decoder(TenantChange)
_key_request = msgspec.json.Decoder(KeyRequest)


async def list_tenants(service: Service, exchange: Exchange) -> None:
    store = _store(service)
    await _reply_list(exchange, [_tenant(service, tenant) for tenant in await _guard(store.tenants())])


async def create_tenant(service: Service, exchange: Exchange) -> None:
    request = decode(_tenant_request, await exchange.body(service.settings.body_limit))
    _check_tier(service, request.tier)
    made = await _guard(_store(service).create_tenant(request.id, name=request.name, tier=request.tier))
    service.identities_changed()
    await exchange.reply_json(_tenant(service, made))


async def change_tenant(service: Service, exchange: Exchange) -> None:
    request = decode(_tenant_change, await exchange.body(service.settings.body_limit))
    _check_tier(service, request.tier)
    store, id = _store(service), exchange.path.rpartition("/")[2]
    if not await _guard(store.tenants(id)):
        raise NotFound(f"There is no tenant `{id[:128]}`.")
    changed = await _guard(store.update_tenant(id, name=request.name, tier=request.tier, disabled=request.disabled))
    service.identities_changed()
    await exchange.reply_json(_tenant(service, changed))


async def list_keys(service: Service, exchange: Exchange) -> None:
    await _reply_list(exchange, [_key(key) for key in await _guard(_store(service).keys())])


async def create_key(service: Service, exchange: Exchange) -> None:
    """The reply is the only place where the key itself ever appears."""
    request = decode(_key_request, await exchange.body(service.settings.body_limit))
    key, minted = await _guard(
        _store(service).create_key(
            request.tenant,
            user=request.user,
            name=request.name,
            scopes=request.scopes,
            expires_at=request.expires_at,
        )
    )
    service.identities_changed()
    await exchange.reply_json({**_key(key), "key": minted.text})


async def revoke_key(service: Service, exchange: Exchange) -> None:
    id = exchange.path.rpartition("/")[2]
    if not await _guard(_store(service).revoke_key(id)):
        raise NotFound(f"There is no key `{id[:128]}` that still works.")
    service.identities_changed()
    await exchange.reply_json({"id": id, "object": "key", "revoked": True})


def _store(service: Service) -> IdentityStore:
    if service.identities is None:
        raise KeyStoreUnavailable("This gateway runs without a store for tenants and keys.")
    return service.identities


async def _guard(work: Any) -> Any:
    try:
        return await work
    except IdentityError as error:
        message = str(error)
        raise InvalidRequest(f"{message[:1].upper()}{message[1:]}.") from error
    except DatabaseError as error:
        raise KeyStoreUnavailable("The store of tenants and keys cannot be reached at the moment.") from error


def _check_tier(service: Service, tier: str | None) -> None:
    names = [entry.name for entry in service.settings.tiers]
    if tier and tier not in names:
        raise InvalidRequest(f"There is no tier `{tier[:128]}`; there are {', '.join(names)}.", param="tier")


async def _reply_list(exchange: Exchange, data: list[dict[str, Any]]) -> None:
    await exchange.reply_json({"object": "list", "data": data})


def _tenant(service: Service, tenant: Tenant) -> dict[str, Any]:
    return {"object": "tenant", **asdict(tenant), "tier": tenant.tier or service.settings.default_tier}


def _key(key: Key) -> dict[str, Any]:
    return {"object": "key", **asdict(key)}
