"""The store of a fleet under drill: tenants and keys before it, every charge after it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from penstock.fleet.drills.accounting import Row
from penstock.identity import IdentityStore
from penstock.metering.ledger import Ledger
from penstock.storage import DatabaseError, open_database

TENANTS = ("north", "south")
_SETTLED_S = 300.0
_ROWS = (
    "SELECT o.id, o.request_id, s.prompt_tokens, s.cached_tokens, s.completion_tokens, s.cost_nanos, s.settled_by "
    "FROM charges_opened o LEFT JOIN charges_settled s ON s.id = o.id"
)


@dataclass(frozen=True, slots=True)
class Keys:
    """A key of each tenant, one for batches, one that is revoked, and the operator's."""

    clients: list[str]
    batches: str
    revoked: str
    admin: str


async def create_keys(store: str) -> Keys:
    database = await open_database(store)
    try:
        identity = IdentityStore(database)
        await identity.prepare()
        keys = []
        for tenant in TENANTS:
            await identity.create_tenant(tenant, tier="enterprise")
            keys.append((await identity.create_key(tenant))[1].text)
        gone, minted = await identity.create_key(TENANTS[0])
        await identity.revoke_key(gone.id)
        _, batches = await identity.create_key(TENANTS[1])
        _, admin = await identity.create_key(TENANTS[0], scopes=("inference", "metrics", "admin"))
        return Keys(keys, batches.text, minted.text, admin.text)
    finally:
        await database.close()


async def charges(store: str, prefix: str, within: float = _SETTLED_S) -> list[Row]:
    """Every charge of requests whose id begins so, once none is open any more or the time is over."""
    deadline = time.monotonic() + within
    while True:
        try:
            database = await open_database(store)
            try:
                left = await Ledger(database).open_charges()
                if not any(entry.charge.request_id.startswith(prefix) for entry in left) or time.monotonic() > deadline:
                    found = await database.fetch(_ROWS)
                    break
            finally:
                await database.close()
        except DatabaseError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.25)
    return [
        Row(id, request, prompt or 0, cached or 0, completion or 0, cost or 0, by)
        for id, request, prompt, cached, completion, cost, by in found
        if request.startswith(prefix)
    ]


async def settled_tokens(store: str, key: str) -> int:
    """Completion tokens that a key was charged for."""
    database = await open_database(store)
    try:
        id = key.rpartition("_")[0]
        sql = "SELECT CAST(COALESCE(SUM(completion_tokens), 0) AS BIGINT) FROM charges_settled WHERE key_id = ?"
        ((total,),) = await database.fetch(sql, id)
        return int(total)
    finally:
        await database.close()
