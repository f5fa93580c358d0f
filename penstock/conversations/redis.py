"""Conversations in Redis or Valkey, shared by several gateways: one hash each, which expires in Redis.

Keys are `ctx:ID:OWNER` (the conversation), `ctx:ID:OWNER:lease`, and `ctx-of:OWNER`, which lists an owner's ids by last
use. Everything that must be atomic is one script. Leases use Redis's own clock.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.conversations.conversation import Owner
from penstock.conversations.store import ConversationStore, ListedConversation, StoredConversation
from penstock.errors import ConfigError, needs_extra
from penstock.storage import DatabaseError

TIMEOUT_S = 2.0

# KEYS: conversation, lease. ARGV: token, life of the lease in ms.
_BEGIN = """
if not redis.call('SET', KEYS[2], ARGV[1], 'NX', 'PX', ARGV[2]) then return {0} end
local found = redis.call('HMGET', KEYS[1], 'data', 'summary', 'created', 'updated')
return {1, found[1] or '', found[2] or '', found[3] or '0', found[4] or '0'}
"""
# KEYS: lease. ARGV: token, life in ms.
_RENEW = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0"
# KEYS: lease. ARGV: token.
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"
# KEYS: conversation, lease, the owner's list. ARGV: token, data, turns, now, life in ms, id, most conversations, owner.
_COMMIT = """
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return 0 end
redis.call('HSETNX', KEYS[1], 'created', ARGV[4])
redis.call('HSET', KEYS[1], 'data', ARGV[2], 'turns', ARGV[3], 'updated', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('DEL', KEYS[2])
redis.call('ZADD', KEYS[3], ARGV[4], ARGV[6])
redis.call('PEXPIRE', KEYS[3], ARGV[5])
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', tonumber(ARGV[4]) - tonumber(ARGV[5]) / 1000)
local excess = redis.call('ZCARD', KEYS[3]) - tonumber(ARGV[7])
if excess > 0 then
  for _, id in ipairs(redis.call('ZRANGE', KEYS[3], 0, excess - 1)) do
    redis.call('DEL', 'ctx:' .. id .. ':' .. ARGV[8])
  end
  redis.call('ZREMRANGEBYRANK', KEYS[3], 0, excess - 1)
end
return 1
"""
# KEYS: conversation. ARGV: when it was made, summary.
_SUMMARISE = """
if redis.call('HGET', KEYS[1], 'created') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'summary', ARGV[2])
return 1
"""


class RedisConversations(ConversationStore):
    """See `ConversationStore`."""

    def __init__(self, url: str, *, ttl_s: float, most: int, clock: Callable[[], float] = time.time) -> None:
        try:
            from redis.asyncio import Redis
        except ImportError as error:
            raise ConfigError(f"conversations.url: Redis {needs_extra('redis')}") from error
        self._redis: Any = Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        scripts = (_BEGIN, _RENEW, _RELEASE, _COMMIT, _SUMMARISE)
        self._begin, self._renew, self._release, self._commit, self._summarise = map(
            self._redis.register_script, scripts
        )
        self._ttl_s = ttl_s
        self._most = most
        self._clock = clock

    async def begin(self, owner: Owner, id: str, lease: str, lease_s: float) -> StoredConversation | None:
        key = _key(owner, id)
        granted, *found = await _guarded(self._begin(keys=[key, _lease(key)], args=[lease, _ms(lease_s)]))
        if not granted:
            return None
        data, summary, created, updated = found
        return StoredConversation(data, summary, float(created), float(updated), self._clock() + self._ttl_s)

    async def renew(self, owner: Owner, id: str, lease: str, lease_s: float) -> None:
        await _guarded(self._renew(keys=[_lease(_key(owner, id))], args=[lease, _ms(lease_s)]))

    async def commit(self, owner: Owner, id: str, lease: str, data: bytes, turns: int) -> bool:
        key = _key(owner, id)
        about: list[bytes | str | int] = [lease, data, turns, repr(self._clock()), _ms(self._ttl_s), id]
        arguments = [*about, self._most, owner.digest]
        return bool(await _guarded(self._commit(keys=[key, _lease(key), _list(owner)], args=arguments)))

    async def release(self, owner: Owner, id: str, lease: str) -> None:
        await _guarded(self._release(keys=[_lease(_key(owner, id))], args=[lease]))

    async def summarise(self, owner: Owner, id: str, created_at: float, summary: bytes) -> bool:
        return bool(await _guarded(self._summarise(keys=[_key(owner, id)], args=[repr(created_at), summary])))

    async def get(self, owner: Owner, id: str) -> StoredConversation | None:
        key = _key(owner, id)
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hmget(key, "data", "summary", "created", "updated").pttl(key)
            (data, summary, created, updated), left = await _guarded(pipeline.execute())
        if data is None:
            return None
        return StoredConversation(data, summary or b"", float(created), float(updated), self._clock() + left / 1000)

    async def list(self, owner: Owner, limit: int) -> list[ListedConversation]:
        ids = [id.decode() for id in await _guarded(self._redis.zrevrange(_list(owner), 0, limit - 1))]
        async with self._redis.pipeline(transaction=False) as pipeline:
            for id in ids:
                key = _key(owner, id)
                pipeline.hmget(key, "created", "updated", "turns").pttl(key)
            found = await _guarded(pipeline.execute())
        now = self._clock()
        return [
            ListedConversation(id, float(created), float(updated), now + left / 1000, int(turns))
            for id, (created, updated, turns), left in zip(ids, found[::2], found[1::2], strict=True)
            if created is not None
        ]

    async def delete(self, owner: Owner, id: str) -> bool:
        key = _key(owner, id)
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.delete(key).delete(_lease(key)).zrem(_list(owner), id)
            found, *_ = await _guarded(pipeline.execute())
        return bool(found)

    async def close(self) -> None:
        await self._redis.aclose()


def _key(owner: Owner, id: str) -> str:
    return f"ctx:{id}:{owner.digest}"


def _lease(key: str) -> str:
    return f"{key}:lease"


def _list(owner: Owner) -> str:
    return f"ctx-of:{owner.digest}"


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


async def _guarded(work: Awaitable[Any]) -> Any:
    from redis.exceptions import RedisError

    try:
        return await work
    except (RedisError, OSError, TimeoutError) as error:
        raise DatabaseError(f"Redis: {error or type(error).__name__}") from error
