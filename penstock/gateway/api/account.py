"""/v1/account and /v1/keys: what a caller may know of itself, its limits and the keys of its tenant.

Both show the caller's own tenant only; a key that belongs to a user sees that user's keys and spending. No secret of a
key is stored, so none can appear here.
"""

from __future__ import annotations

from typing import Any

from penstock.gateway.accounting.quotas import Quotas
from penstock.gateway.api.admin.identity import described_key, guard
from penstock.gateway.app.decoding import decode_query
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.app.pagination import NoQuery
from penstock.identity import ApiKey, Caller, IdentityStore
from penstock.metering.ledger import Ledger
from penstock.metering.spend import NOTHING, spent, spent_by_key


class AccountEndpoints:
    """The caller's own account."""

    def __init__(self, store: IdentityStore, ledger: Ledger, quotas: Quotas) -> None:
        self._store = store
        self._ledger = ledger
        self._quotas = quotas

    async def show_account(self, exchange: Exchange) -> None:
        decode_query(NoQuery, exchange.scope)
        caller, quotas = exchange.caller, self._quotas
        limits: dict[str, Any] = {"allowed": None, "used": []}
        if caller.key:  # without a key, nothing of a tier applies
            limits["allowed"] = quotas.allowed(caller.tier, caller.limits)
            limits["used"] = await quotas.standing(
                caller.tenant, caller.tier, caller.limits, caller.key, caller.key_limits
            )
        await exchange.reply_json(
            {
                "object": "account",
                "tenant": caller.tenant,
                "user": caller.user or None,
                "key": caller.key or None,
                "scopes": sorted(caller.scopes),
                "tier": caller.tier or None,
                **limits,
                "spent": await guard(spent(self._ledger, caller.tenant, caller.only_user)),
            }
        )

    async def list_own_keys(self, exchange: Exchange) -> None:
        decode_query(NoQuery, exchange.scope)
        tenant, user = exchange.caller.tenant, exchange.caller.only_user
        keys = await guard(self._store.keys(tenant))
        costs = await guard(spent_by_key(self._ledger, tenant))
        data = [
            {**_shown(exchange.caller, key), "spent": costs.get(key.id, NOTHING)}
            for key in keys
            if user is None or key.user == user
        ]
        await exchange.reply_json({"object": "list", "data": data})


def _shown(caller: Caller, key: ApiKey) -> dict[str, Any]:
    """A key of the tenant. The lists of another key may name what does not exist for the caller."""
    shown = described_key(key)
    if caller.access.limited and key.id != caller.key:
        del shown["allow"]
    return shown
