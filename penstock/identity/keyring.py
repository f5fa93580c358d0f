"""Resolves API keys to callers, with a short-lived cache of the store's answers.

A key is looked up again after `fresh_s`, so a revocation or a change of tier takes effect that soon. While the store is
unavailable, keys seen within `grace_s` keep working and all others get `KeyStoreUnavailable` (503): an outage never
looks like a wrong key. Both caches are bounded, and made-up keys cannot evict real ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.identity.access import UNLIMITED, Access, AllowList
from penstock.identity.entities import OPEN_CALLER, Caller
from penstock.identity.key_marker import KeysLost
from penstock.identity.secrets import key_id, matches
from penstock.identity.store import IdentityStore, StoredKey
from penstock.protocol.errors import AuthenticationError, KeyStoreUnavailable
from penstock.storage import DatabaseError

log = logging.getLogger(__name__)

KNOWN = 65536
UNKNOWN = 4096


@dataclass(slots=True)
class _Entry:
    stored: StoredKey | None
    at: float
    caller: Caller | None = None
    """The caller of this key; built on first use."""


class KeyRing:
    """One per gateway process."""

    def __init__(
        self,
        store: IdentityStore,
        *,
        default_tier: str = "",
        tiers: Mapping[str, AllowList] | None = None,
        fresh_s: float = 5.0,
        grace_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`tiers`: what each tier may use."""
        self._store = store
        self._default_tier = default_tier
        self._tiers = tiers or {}
        self._fresh_s = fresh_s
        self._grace_s = grace_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._known: OrderedDict[str, _Entry] = OrderedDict()
        self._unknown: OrderedDict[str, _Entry] = OrderedDict()
        self._lookups: dict[tuple[int, str], asyncio.Future[StoredKey | None]] = {}
        self._changes = 0
        self._closed = False
        self._asked_at = float("-inf")
        self.store_up = True

    async def caller(self, authorization: str | None) -> Caller:
        """The caller for an `Authorization` header (or an `x-api-key`); `AuthenticationError` if there is none."""
        if await self._open():
            return OPEN_CALLER
        token = _token(authorization)
        id = key_id(token)
        if id is None:
            raise AuthenticationError(
                "An API key is needed; send it as `Authorization: Bearer ...`." if not token else _WRONG
            )
        entry = await self._find(id)
        if entry.stored is None or not matches(token, entry.stored.digest):
            raise AuthenticationError(_WRONG)
        return self._checked(entry.stored, entry)

    async def holder(self, id: str) -> Caller:
        """The caller of a key given by its public part, for work submitted earlier with that key."""
        entry = await self._find(id)
        if entry.stored is None:
            raise AuthenticationError(f"The API key {id} no longer exists.")
        return self._checked(entry.stored, entry)

    def _checked(self, stored: StoredKey, entry: _Entry) -> Caller:
        key, tenant = stored.key, stored.tenant
        if not key.usable(self._wall_clock()):
            raise AuthenticationError(f"The API key {key.id} is {'revoked' if key.revoked_at else 'expired'}.")
        if tenant.disabled:
            raise AuthenticationError(f"The tenant of API key {key.id} is disabled.")
        if entry.caller is None:
            tier, scopes = tenant.tier or self._default_tier, frozenset(key.scopes)
            entry.caller = Caller(
                tenant.id,
                key.user,
                key.id,
                tier,
                scopes,
                tenant.limits,
                key.limits,
                tenant.require.narrowed(key.require),
                Access.of(tenant.id, self._tiers.get(tier, UNLIMITED), tenant.allow, key.allow),
            )
        return entry.caller

    def refresh(self) -> None:
        """Expires the whole cache after a change. Lookups already under way are neither awaited by later requests nor
        cached."""
        self._changes += 1
        self._asked_at = min(self._asked_at, self._clock() - self._fresh_s)
        for entry in (*self._known.values(), *self._unknown.values()):
            entry.at = min(entry.at, self._clock() - self._fresh_s)

    async def _open(self) -> bool:
        """Whether there are no keys at all. Not checked again once there is one."""
        if self._closed:
            return False
        now = self._clock()
        if now - self._asked_at >= self._fresh_s:
            changes = self._changes
            try:
                if await self._store.has_keys():
                    self._closed = True
                if changes == self._changes:
                    self._asked_at = now
                self._seen(True)
            except KeysLost as error:
                self._seen(False, error)
                raise KeyStoreUnavailable from error
            except DatabaseError as error:
                self._seen(False, error)
                if self._asked_at == float("-inf"):
                    raise KeyStoreUnavailable from error
        return not self._closed

    async def _find(self, id: str) -> _Entry:
        now = self._clock()
        known = self._known.get(id)
        if known is not None and now - known.at < self._fresh_s:
            return known
        unknown = self._unknown.get(id)
        if unknown is not None and now - unknown.at < self._fresh_s:
            return unknown
        changes = self._changes
        try:
            stored = await self._look_up(id)
        except DatabaseError as error:
            self._seen(False, error)
            if known is not None and now - known.at < self._grace_s:
                return known
            raise KeyStoreUnavailable from error
        self._seen(True)
        if changes != self._changes:
            return _Entry(stored, now)
        memory, limit = (self._unknown, UNKNOWN) if stored is None else (self._known, KNOWN)
        entry = memory[id] = _Entry(stored, now)
        memory.move_to_end(id)
        if len(memory) > limit:
            memory.popitem(last=False)
        (self._known if stored is None else self._unknown).pop(id, None)
        return entry

    async def _look_up(self, id: str) -> StoredKey | None:
        """One query to the store for all concurrent requests with the same key, between two changes."""
        question = self._changes, id
        waiting = self._lookups.get(question)
        if waiting is None:
            waiting = self._lookups[question] = asyncio.ensure_future(self._store.find(id))
            waiting.add_done_callback(lambda _: self._lookups.pop(question, None))
        return await asyncio.shield(waiting)

    def _seen(self, up: bool, error: Exception | None = None) -> None:
        if up != self.store_up:
            self.store_up = up
            if up:
                log.info("key store is available again")
            else:
                log.error("key store is unavailable; only recently used keys keep working", extra={"why": str(error)})


_WRONG = "The API key is not valid."


def _token(authorization: str | None) -> str:
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else (authorization or "").strip()
