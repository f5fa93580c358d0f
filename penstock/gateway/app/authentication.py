"""Who sends a request, and whether that caller may use the endpoint.

Without a store for keys, and as long as it holds none, every request comes from the open caller, unless a web page of
another origin may have sent it (`browsers.py`).
"""

from __future__ import annotations

import dataclasses

from penstock.gateway.app.browsers import BrowserGuard
from penstock.gateway.app.endpoint import Endpoint
from penstock.gateway.app.exchange import Exchange
from penstock.identity import OPEN_CALLER, Caller, KeyRing
from penstock.identity.access import UNLIMITED, Access, AllowList
from penstock.protocol.errors import AuthenticationError, KeyStoreUnavailable, PermissionDenied


class OpenAuthentication:
    """Accepts every request that no foreign web page can have sent: there is no store for keys."""

    def __init__(self, default_tier: str, guard: BrowserGuard, allow: AllowList = UNLIMITED) -> None:
        """`allow`: what that tier may use."""
        self._allow = allow
        access = Access.of(OPEN_CALLER.tenant, allow)
        self._open_caller = dataclasses.replace(OPEN_CALLER, tier=default_tier, access=access)
        self._guard = guard

    async def caller(self, exchange: Exchange, endpoint: Endpoint) -> Caller:
        """The caller of a request, if it may use the endpoint; raises otherwise."""
        self._guard.check(exchange, json_only=endpoint.form is None and not endpoint.untyped)
        return self._open_caller

    async def identified(self, exchange: Exchange) -> Caller | None:
        """Who sends a request that needs no key; None: somebody without a key that works."""
        return self._open_caller

    async def holder(self, tenant: str, key: str) -> Caller:
        """The caller that asked, earlier, for work that is done only now; raises when its key no longer works."""
        return dataclasses.replace(self._open_caller, tenant=tenant, access=Access.of(tenant, self._allow))

    def refresh(self) -> None:
        """Tenants or keys have changed: look them up again."""


class Authentication(OpenAuthentication):
    """Checks keys against the store, through the key ring."""

    def __init__(self, keyring: KeyRing, default_tier: str, guard: BrowserGuard, allow: AllowList = UNLIMITED) -> None:
        super().__init__(default_tier, guard, allow)
        self._keyring = keyring

    async def caller(self, exchange: Exchange, endpoint: Endpoint) -> Caller:
        sent = exchange.header(b"authorization") or exchange.header(b"x-api-key")
        caller = await self._keyring.caller(None if sent is None else sent.decode("latin-1"))
        if caller is OPEN_CALLER:
            return await super().caller(exchange, endpoint)
        if endpoint.scope not in caller.scopes:
            raise PermissionDenied(f"The API key {caller.key} lacks the scope `{endpoint.scope}`.")
        return caller

    async def identified(self, exchange: Exchange) -> Caller | None:
        sent = exchange.header(b"authorization") or exchange.header(b"x-api-key")
        try:
            caller = await self._keyring.caller(None if sent is None else sent.decode("latin-1"))
        except (AuthenticationError, KeyStoreUnavailable):
            return None
        return self._open_caller if caller is OPEN_CALLER else caller

    async def holder(self, tenant: str, key: str) -> Caller:
        if not key:
            return await super().holder(tenant, key)
        return await self._keyring.holder(key)

    def refresh(self) -> None:
        self._keyring.refresh()
