"""/v1/admin/tenants and /v1/admin/keys: the same store as `penstock keys`, for keys with the scope `admin`."""

from __future__ import annotations

import datetime
from dataclasses import asdict
from typing import Any

import msgspec

from penstock.gateway.app.decoding import decode
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.process.service import Service
from penstock.identity import ApiKey, IdentityStore, Scope, Tenant
from penstock.identity.allowance import NO_ALLOWANCE, Allowance, AllowanceChange
from penstock.identity.store import IdentityError
from penstock.metering.prices import NANOS
from penstock.protocol.errors import InvalidRequest, KeyStoreUnavailable, NotFound
from penstock.storage import DatabaseError


class TenantRequest(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    name: str = ""
    tier: str = ""
    limits: Allowance = NO_ALLOWANCE
    """Instead of the tier's."""


class TenantChange(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None
    tier: str | None = None
    disabled: bool | None = None
    limits: AllowanceChange | None = None


class KeyRequest(msgspec.Struct, forbid_unknown_fields=True):
    tenant: str
    user: str = ""
    name: str = ""
    scopes: list[Scope] = msgspec.field(default_factory=lambda: ["inference"])
    expires_at: float | None = None
    """Seconds since 1970; null: never."""
    limits: Allowance = NO_ALLOWANCE
    """Besides those of its tenant."""


class KeyChange(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None
    limits: AllowanceChange | None = None


_tenant_request = msgspec.json.Decoder(TenantRequest)
_tenant_change = msgspec.json.Decoder(TenantChange)
_key_request = msgspec.json.Decoder(KeyRequest)
_key_change = msgspec.json.Decoder(KeyChange)


async def list_tenants(service: Service, exchange: Exchange) -> None:
    store = _store(service)
    await _reply_list(exchange, [_tenant(service, tenant) for tenant in await _guard(store.tenants())])


async def create_tenant(service: Service, exchange: Exchange) -> None:
    request = decode(_tenant_request, await exchange.body(service.settings.body_limit))
    _check_tier(service, request.tier)
    made = await _guard(
        _store(service).create_tenant(request.id, name=request.name, tier=request.tier, limits=request.limits)
    )
    await service.identities_changed()
    await exchange.reply_json(_tenant(service, made))


async def change_tenant(service: Service, exchange: Exchange) -> None:
    request = decode(_tenant_change, await exchange.body(service.settings.body_limit))
    _check_tier(service, request.tier)
    known = await _known(service, exchange)
    work = _store(service).update_tenant(
        known.id, name=request.name, tier=request.tier, disabled=request.disabled, limits=request.limits
    )
    changed = await _guard(work)
    await service.identities_changed()
    await exchange.reply_json(_tenant(service, changed))


async def get_tenant(service: Service, exchange: Exchange) -> None:
    """With what it may use, and what it has spent of its budgets."""
    tenant = await _known(service, exchange)
    now = datetime.datetime.now(datetime.UTC)
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    spent: dict[str, float | None] = {"today": None, "month": None}
    if service.accounts is not None:
        for period, since in (("today", today), ("month", today.replace(day=1))):
            totals = service.accounts.ledger.totals(since=since.timestamp(), tenant=tenant.id)
            spent[period] = (await _guard(totals))[0].cost_nanos / NANOS
    shown = _tenant(service, tenant)
    await exchange.reply_json(
        {**shown, "allowed": service.quotas.allowed(shown["tier"], tenant.limits), "spent": spent}
    )


async def _known(service: Service, exchange: Exchange) -> Tenant:
    id = exchange.path.rpartition("/")[2]
    found: list[Tenant] = await _guard(_store(service).tenants(id))
    if not found:
        raise NotFound(f"There is no tenant `{id[:128]}`.")
    return found[0]


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
            limits=request.limits,
        )
    )
    await service.identities_changed()
    await exchange.reply_json({**_key(key), "key": minted.text})


async def change_key(service: Service, exchange: Exchange) -> None:
    request = decode(_key_change, await exchange.body(service.settings.body_limit))
    store, id = _store(service), exchange.path.rpartition("/")[2]
    found = await _guard(store.find(id))
    if found is None or found.key.revoked_at is not None:
        raise NotFound(f"There is no key `{id[:128]}` that still works.")
    changed = await _guard(store.update_key(id, name=request.name, limits=request.limits))
    await service.identities_changed()
    await exchange.reply_json(_key(changed))


async def revoke_key(service: Service, exchange: Exchange) -> None:
    id = exchange.path.rpartition("/")[2]
    if not await _guard(_store(service).revoke_key(id)):
        raise NotFound(f"There is no key `{id[:128]}` that still works.")
    await service.identities_changed()
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


def _key(key: ApiKey) -> dict[str, Any]:
    return {"object": "key", **asdict(key)}
