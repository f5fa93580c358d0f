"""Tenants and keys in the database."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.errors import PenstockError
from penstock.identity.access import UNLIMITED, AllowList, AllowListChange
from penstock.identity.allowance import NO_ALLOWANCE, Allowance, AllowanceChange
from penstock.identity.entities import SCOPES, ApiKey, Scope, Tenant
from penstock.identity.key_marker import KeyMarker
from penstock.identity.labels import NO_DEMAND, Demand, read_demand, stored_demand
from penstock.identity.secrets import Minted, mint
from penstock.storage import Database, DatabaseError, Row, Statement

log = logging.getLogger(__name__)

_VERSIONS = (
    (
        "CREATE TABLE IF NOT EXISTS tenants (id TEXT PRIMARY KEY, name TEXT NOT NULL, tier TEXT NOT NULL, "
        "disabled INTEGER NOT NULL DEFAULT 0, created_at DOUBLE PRECISION NOT NULL)",
        "CREATE TABLE IF NOT EXISTS keys (id TEXT PRIMARY KEY, digest TEXT NOT NULL, "
        "tenant TEXT NOT NULL REFERENCES tenants (id), user_id TEXT NOT NULL, name TEXT NOT NULL, "
        "scopes TEXT NOT NULL, created_at DOUBLE PRECISION NOT NULL, expires_at DOUBLE PRECISION, "
        "revoked_at DOUBLE PRECISION)",
        "CREATE INDEX IF NOT EXISTS keys_by_tenant ON keys (tenant)",
    ),
)
_LIMITS_VERSIONS = (
    (
        "CREATE TABLE IF NOT EXISTS own_limits (kind TEXT NOT NULL, id TEXT NOT NULL, limits TEXT NOT NULL, "
        "PRIMARY KEY (kind, id))",
    ),
)
_DEMAND_VERSIONS = (
    (
        "CREATE TABLE IF NOT EXISTS own_demands (kind TEXT NOT NULL, id TEXT NOT NULL, demand TEXT NOT NULL, "
        "PRIMARY KEY (kind, id))",
    ),
)
_ALLOW_VERSIONS = (
    (
        "CREATE TABLE IF NOT EXISTS allow_lists (kind TEXT NOT NULL, id TEXT NOT NULL, lists TEXT NOT NULL, "
        "PRIMARY KEY (kind, id))",
    ),
)
_KEY = (
    "k.id, k.tenant, k.user_id, k.name, k.scopes, k.created_at, k.expires_at, k.revoked_at, COALESCE(kl.limits, ''), "
    "COALESCE(kd.demand, ''), COALESCE(ka.lists, '')"
)
_TENANT = (
    "t.id, t.name, t.tier, t.disabled, t.created_at, COALESCE(tl.limits, ''), COALESCE(td.demand, ''), "
    "COALESCE(ta.lists, '')"
)
_OF_KEYS = (
    "LEFT JOIN own_limits kl ON kl.kind = 'key' AND kl.id = k.id "
    "LEFT JOIN own_demands kd ON kd.kind = 'key' AND kd.id = k.id "
    "LEFT JOIN allow_lists ka ON ka.kind = 'key' AND ka.id = k.id"
)
_OF_TENANTS = (
    "LEFT JOIN own_limits tl ON tl.kind = 'tenant' AND tl.id = t.id "
    "LEFT JOIN own_demands td ON td.kind = 'tenant' AND td.id = t.id "
    "LEFT JOIN allow_lists ta ON ta.kind = 'tenant' AND ta.id = t.id"
)
_KEYS = f"keys k {_OF_KEYS}"
_TENANTS = f"tenants t {_OF_TENANTS}"
_LIMIT = (
    "INSERT INTO own_limits (kind, id, limits) VALUES (?, ?, ?) "
    "ON CONFLICT (kind, id) DO UPDATE SET limits = excluded.limits"
)
_DEMAND = (
    "INSERT INTO own_demands (kind, id, demand) VALUES (?, ?, ?) "
    "ON CONFLICT (kind, id) DO UPDATE SET demand = excluded.demand"
)
_ALLOW = (
    "INSERT INTO allow_lists (kind, id, lists) VALUES (?, ?, ?) "
    "ON CONFLICT (kind, id) DO UPDATE SET lists = excluded.lists"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+:-]{0,127}")


class IdentityError(PenstockError):
    """A tenant or key cannot be created or changed as requested."""


@dataclass(frozen=True, slots=True)
class StoredKey:
    """Everything needed to check a key."""

    key: ApiKey
    digest: str
    tenant: Tenant


class IdentityStore:
    """Reads and changes tenants and keys."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock
        self._marker = KeyMarker(database)

    async def prepare(self) -> None:
        await self._database.migrate("identity", _VERSIONS)
        await self._database.migrate("own limits", _LIMITS_VERSIONS)
        await self._database.migrate("own demands", _DEMAND_VERSIONS)
        await self._database.migrate("allow lists", _ALLOW_VERSIONS)

    async def create_tenant(
        self,
        id: str,
        *,
        name: str = "",
        tier: str = "",
        limits: Allowance = NO_ALLOWANCE,
        require: Demand = NO_DEMAND,
        allow: AllowList = UNLIMITED,
    ) -> Tenant:
        _check_name(id, "tenant")
        tenant = Tenant(id, name, tier, created_at=self._clock(), limits=limits, require=require, allow=allow)
        statements: list[Statement] = [
            (
                "INSERT INTO tenants (id, name, tier, disabled, created_at) VALUES (?, ?, ?, 0, ?) "
                "ON CONFLICT (id) DO NOTHING",
                (tenant.id, tenant.name, tenant.tier, tenant.created_at),
            )
        ]
        if limits is not NO_ALLOWANCE:
            statements.append((_LIMIT, ("tenant", id, limits.stored())))
        if require:
            statements.append((_DEMAND, ("tenant", id, stored_demand(require))))
        if allow != UNLIMITED:
            statements.append((_ALLOW, ("tenant", id, allow.stored())))
        if not (await self._database.transact(statements, guarded=True))[0]:
            raise IdentityError(f"tenant {id!r} already exists")
        return tenant

    async def update_tenant(
        self,
        id: str,
        *,
        name: str | None = None,
        tier: str | None = None,
        disabled: bool | None = None,
        limits: AllowanceChange | None = None,
        require: Demand | None = None,
        allow: AllowListChange | None = None,
    ) -> Tenant:
        """Changes the given fields; a demand replaces the one before. The keys of a disabled tenant stop working."""
        known = await self.tenants(id)
        if not known:
            raise IdentityError(f"there is no tenant {id!r}")
        statements: list[Statement] = [
            (
                "UPDATE tenants SET name = COALESCE(?, name), tier = COALESCE(?, tier), "
                "disabled = COALESCE(?, disabled) WHERE id = ?",
                (name, tier, None if disabled is None else int(disabled), id),
            )
        ]
        if limits is not None:
            statements.append((_LIMIT, ("tenant", id, known[0].limits.changed(limits).stored())))
        if require is not None:
            statements.append((_DEMAND, ("tenant", id, stored_demand(require))))
        if allow is not None:
            statements.append((_ALLOW, ("tenant", id, known[0].allow.changed(allow).stored())))
        await self._database.transact(statements)
        return (await self.tenants(id))[0]

    async def tenants(self, id: str | None = None) -> list[Tenant]:
        where, values = ("WHERE t.id = ? ", (id,)) if id is not None else ("", ())
        rows = await self._database.fetch(f"SELECT {_TENANT} FROM {_TENANTS} {where}ORDER BY t.id", *values)
        return [_tenant(row) for row in rows]

    async def create_key(
        self,
        tenant: str,
        *,
        user: str = "",
        name: str = "",
        scopes: Sequence[Scope] = ("inference",),
        expires_at: float | None = None,
        limits: Allowance = NO_ALLOWANCE,
        require: Demand = NO_DEMAND,
        allow: AllowList = UNLIMITED,
    ) -> tuple[ApiKey, Minted]:
        """Creates a key; returns it with its text, which is not stored."""
        if user:
            _check_name(user, "user")
        unknown = [scope for scope in scopes if scope not in SCOPES]
        if unknown or not scopes:
            raise IdentityError(f"scopes are {', '.join(SCOPES)}, not {', '.join(unknown) or 'none'}")
        if not await self.tenants(tenant):
            raise IdentityError(f"there is no tenant {tenant!r}")
        minted = mint()
        key = ApiKey(minted.id, tenant, user, name, tuple(scopes), self._clock(), expires_at, limits=limits)
        key = replace(key, require=require, allow=allow)
        if limits is not NO_ALLOWANCE:  # before the key, so that the key never works without its limits
            await self._database.execute(_LIMIT, "key", key.id, limits.stored())
        if require:
            await self._database.execute(_DEMAND, "key", key.id, stored_demand(require))
        if allow != UNLIMITED:
            await self._database.execute(_ALLOW, "key", key.id, allow.stored())
        await self._marker.set()
        await self._database.execute(
            "INSERT INTO keys (id, digest, tenant, user_id, name, scopes, created_at, expires_at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            key.id, minted.digest, key.tenant, key.user, key.name, " ".join(key.scopes), key.created_at,
            key.expires_at,
        )  # fmt: skip
        return key, minted

    async def update_key(
        self,
        id: str,
        *,
        name: str | None = None,
        limits: AllowanceChange | None = None,
        require: Demand | None = None,
        allow: AllowListChange | None = None,
    ) -> ApiKey:
        """Changes the given fields of an active key; a demand replaces the one before."""
        found = await self.find(id)
        if found is None or found.key.revoked_at is not None:
            raise IdentityError(f"there is no active key {id!r}")
        if name is not None:
            await self._database.execute("UPDATE keys SET name = ? WHERE id = ?", name, id)
        if limits is not None:
            await self._database.execute(_LIMIT, "key", id, found.key.limits.changed(limits).stored())
        if require is not None:
            await self._database.execute(_DEMAND, "key", id, stored_demand(require))
        if allow is not None:
            await self._database.execute(_ALLOW, "key", id, found.key.allow.changed(allow).stored())
        changed = await self.find(id)
        assert changed is not None, "keys are never deleted"
        return changed.key

    async def revoke_key(self, id: str) -> bool:
        """Revokes a key; False if there is no such active key."""
        changed = await self._database.execute(
            "UPDATE keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL", self._clock(), id
        )
        return bool(changed)

    async def keys(self, tenant: str | None = None) -> list[ApiKey]:
        where, values = ("WHERE k.tenant = ? ", (tenant,)) if tenant is not None else ("", ())
        rows = await self._database.fetch(f"SELECT {_KEY} FROM {_KEYS} {where}ORDER BY k.created_at, k.id", *values)
        return [_key(row) for row in rows]

    async def find(self, id: str) -> StoredKey | None:
        rows = await self._database.fetch(
            f"SELECT {_KEY}, k.digest, {_TENANT} FROM {_KEYS} JOIN tenants t ON t.id = k.tenant {_OF_TENANTS} "
            "WHERE k.id = ?",
            id,
        )
        if not rows:
            return None
        row = rows[0]
        return StoredKey(_key(row[:11]), row[11], _tenant(row[12:]))

    async def has_keys(self) -> bool:
        """Whether a key was ever created: revoking the last one does not open the server. `KeysLost` if there is none
        although one was created: then the database is not the one that it was."""
        if await self._database.fetch("SELECT 1 FROM keys LIMIT 1"):
            try:
                await self._marker.set()  # keys of before there was a marker
            except DatabaseError as error:
                log.warning("it cannot be noted that there are keys", extra={"why": str(error)})
            return True
        missed = await self._marker.missed()
        if missed is not None:
            raise missed
        return False


def _key(row: Row) -> ApiKey:
    id, tenant, user, name, scopes, created_at, expires_at, revoked_at, limits, demand, lists = row
    return ApiKey(
        id,
        tenant,
        user,
        name,
        tuple(scopes.split()),
        created_at,
        expires_at,
        revoked_at,
        Allowance.read(limits),
        read_demand(demand, f"key {id}"),
        AllowList.read(lists),
    )


def _tenant(row: Row) -> Tenant:
    id, name, tier, disabled, created_at, limits, demand, lists = row
    demanded = read_demand(demand, f"tenant {id}")
    return Tenant(id, name, tier, bool(disabled), created_at, Allowance.read(limits), demanded, AllowList.read(lists))


def _check_name(name: str, what: str) -> None:
    if not _NAME.fullmatch(name):
        raise IdentityError(f"the name of a {what} has letters, digits and . _ @ + : - (at most 128), not {name!r}")
