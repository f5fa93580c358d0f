"""/v1/admin/tenants and /v1/admin/keys: the same store as `penstock keys`, for keys with the scope `admin`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.gateway.accounting.quotas import Quotas
from penstock.gateway.app.decoding import decode
from penstock.gateway.app.exchange import Exchange
from penstock.identity import ApiKey, IdentityStore, Scope, Tenant
from penstock.identity.access import UNLIMITED, AllowList, AllowListChange
from penstock.identity.allowance import NO_ALLOWANCE, Allowance, AllowanceChange
from penstock.identity.labels import NO_DEMAND, Demand, LabelError, RequireField, demand_of
from penstock.identity.store import IdentityError
from penstock.metering.ledger import Ledger
from penstock.metering.spend import NOTHING, spent, spent_by_key
from penstock.protocol.errors import InvalidRequest, KeyStoreUnavailable, NotFound, sentence
from penstock.storage import DatabaseError

LATEST = 253_402_300_799
"""The end of the year 9999 in seconds; milliseconds by mistake are beyond it."""


class TenantRequest(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    name: str = ""
    tier: str = ""
    limits: Allowance = NO_ALLOWANCE
    """Override the limits of the tier."""
    require: RequireField | None = None
    """Labels that whatever gets its requests' data must have."""
    allow: AllowList = UNLIMITED
    """What it may use of what its tier may use."""


class TenantChange(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None
    tier: str | None = None
    disabled: bool | None = None
    limits: AllowanceChange | None = None
    require: RequireField | None = None
    """Replaces the demand before; `{}`: none."""
    allow: AllowListChange | None = None


class KeyRequest(msgspec.Struct, forbid_unknown_fields=True):
    tenant: str
    user: str = ""
    name: str = ""
    scopes: list[Scope] = msgspec.field(default_factory=lambda: ["inference"])
    expires_at: Annotated[float, Meta(ge=0, le=LATEST)] | None = None
    """Seconds since 1970; null: never."""
    limits: Allowance = NO_ALLOWANCE
    """In addition to those of its tenant."""
    require: RequireField | None = None
    """In addition to the demand of its tenant."""
    allow: AllowList = UNLIMITED
    """What it may use of what its tenant may use."""


class KeyChange(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None
    limits: AllowanceChange | None = None
    require: RequireField | None = None
    """Replaces the demand before; `{}`: none."""
    allow: AllowListChange | None = None


_tenant_request = msgspec.json.Decoder(TenantRequest)
_tenant_change = msgspec.json.Decoder(TenantChange)
_key_request = msgspec.json.Decoder(KeyRequest)
_key_change = msgspec.json.Decoder(KeyChange)


class IdentityEndpoints:
    """Tenants and keys."""

    def __init__(
        self,
        store: IdentityStore,
        ledger: Ledger,
        quotas: Quotas,
        changed: Callable[[], Awaitable[None]],
        tiers: Sequence[str],
        default_tier: str,
        body_limit: int,
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._quotas = quotas
        self._changed = changed
        self._tiers = tiers
        self._default_tier = default_tier
        self._body_limit = body_limit

    async def list_tenants(self, exchange: Exchange) -> None:
        store = self._store
        await _reply_list(exchange, [self._tenant(tenant) for tenant in await guard(store.tenants())])

    async def create_tenant(self, exchange: Exchange) -> None:
        request = decode(_tenant_request, await exchange.body(self._body_limit))
        self._check_tier(request.tier)
        require = required(request.require, f"tenant {request.id}") or NO_DEMAND
        made = await guard(
            self._store.create_tenant(
                request.id,
                name=request.name,
                tier=request.tier,
                limits=request.limits,
                require=require,
                allow=request.allow,
            )
        )
        if require:
            _note_rule(exchange, "tenant", request.id, require)
        await self._changed()
        await exchange.reply_json(self._tenant(made))

    async def change_tenant(self, exchange: Exchange) -> None:
        request = decode(_tenant_change, await exchange.body(self._body_limit))
        self._check_tier(request.tier)
        known = await self._known(exchange)
        require = required(request.require, f"tenant {known.id}")
        work = self._store.update_tenant(
            known.id,
            name=request.name,
            tier=request.tier,
            disabled=request.disabled,
            limits=request.limits,
            require=require,
            allow=request.allow,
        )
        changed = await guard(work)
        if require is not None:
            _note_rule(exchange, "tenant", known.id, require)
        await self._changed()
        await exchange.reply_json(self._tenant(changed))

    async def get_tenant(self, exchange: Exchange) -> None:
        """A tenant with its limits and what it has spent."""
        tenant = await self._known(exchange)
        shown = self._tenant(tenant)
        await exchange.reply_json(
            {
                **shown,
                "allowed": self._quotas.allowed(shown["tier"], tenant.limits),
                "used": await self._quotas.standing(tenant.id, shown["tier"], tenant.limits),
                "spent": await guard(spent(self._ledger, tenant.id)),
            }
        )

    async def _known(self, exchange: Exchange) -> Tenant:
        id = exchange.path.rpartition("/")[2]
        found: list[Tenant] = await guard(self._store.tenants(id))
        if not found:
            raise NotFound(f"There is no tenant `{id[:128]}`.")
        return found[0]

    async def list_keys(self, exchange: Exchange) -> None:
        costs = await guard(spent_by_key(self._ledger, None))
        keys = await guard(self._store.keys())
        await _reply_list(exchange, [{**described_key(key), "spent": costs.get(key.id, NOTHING)} for key in keys])

    async def create_key(self, exchange: Exchange) -> None:
        """The reply is the only place where the key itself ever appears."""
        request = decode(_key_request, await exchange.body(self._body_limit))
        require = required(request.require, "key") or NO_DEMAND
        key, minted = await guard(
            self._store.create_key(
                request.tenant,
                user=request.user,
                name=request.name,
                scopes=request.scopes,
                expires_at=request.expires_at,
                limits=request.limits,
                require=require,
                allow=request.allow,
            )
        )
        if require:
            _note_rule(exchange, "key", key.id, require)
        await self._changed()
        await exchange.reply_json({**described_key(key), "key": minted.text})

    async def change_key(self, exchange: Exchange) -> None:
        request = decode(_key_change, await exchange.body(self._body_limit))
        store, id = self._store, exchange.path.rpartition("/")[2]
        found = await guard(store.find(id))
        if found is None or found.key.revoked_at is not None:
            raise NotFound(f"There is no key `{id[:128]}` that still works.")
        require = required(request.require, f"key {id}")
        work = store.update_key(id, name=request.name, limits=request.limits, require=require, allow=request.allow)
        changed = await guard(work)
        if require is not None:
            _note_rule(exchange, "key", id, require)
        await self._changed()
        await exchange.reply_json(described_key(changed))

    async def revoke_key(self, exchange: Exchange) -> None:
        id = exchange.path.rpartition("/")[2]
        if not await guard(self._store.revoke_key(id)):
            raise NotFound(f"There is no key `{id[:128]}` that still works.")
        await self._changed()
        await exchange.reply_json({"id": id, "object": "key", "revoked": True})

    def _check_tier(self, tier: str | None) -> None:
        if tier and tier not in self._tiers:
            raise InvalidRequest(f"There is no tier `{tier[:128]}`; there are {', '.join(self._tiers)}.", param="tier")

    def _tenant(self, tenant: Tenant) -> dict[str, Any]:
        shown = {**asdict(tenant), "tier": tenant.tier or self._default_tier, "require": tenant.require.pairs}
        return {"object": "tenant", **shown}


async def guard(work: Any) -> Any:
    try:
        return await work
    except IdentityError as error:
        raise InvalidRequest(sentence(error)) from error
    except DatabaseError as error:
        raise KeyStoreUnavailable("The store of tenants and keys cannot be reached at the moment.") from error


async def _reply_list(exchange: Exchange, data: list[dict[str, Any]]) -> None:
    await exchange.reply_json({"object": "list", "data": data})


def described_key(key: ApiKey) -> dict[str, Any]:
    return {"object": "key", **asdict(key), "require": key.require.pairs}


def _note_rule(exchange: Exchange, kind: str, name: str, require: Demand) -> None:
    """Whoever changes a rule is in the audit log, too."""
    exchange.decide("changed", kind, name, f"requires {require}" if require else "requires nothing")


def required(given: RequireField | None, rule: str) -> Demand | None:
    """The demand of a request to the admin API; None: it gives none."""
    if given is None:
        return None
    try:
        return demand_of(given.items(), rule)
    except LabelError as error:
        raise InvalidRequest(sentence(error), param="require") from error
