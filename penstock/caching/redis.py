"""Cached answers in Redis or Valkey, shared by all gateways with the same URL.

Redis bounds the memory (`maxmemory` with an eviction policy); everything written here expires. An unavailable or slow
Redis counts as a miss: no request waits for the cache.
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any
from urllib.parse import quote

from penstock.caching.store import NOTES, AnswerStore, CacheKey, Clock, Size
from penstock.errors import ConfigError, needs_extra
from penstock.protocol.errors import Overloaded

log = logging.getLogger(__name__)

TIMEOUT_S = 0.25
AWAY_S = 1.0
"""After a failure, Redis is not tried for this long."""
_PREFIX = "penstock:cache"

# KEYS: the list, its epoch. ARGV: question, most, ttl in ms, a new epoch. When the list is full, a quarter of it goes.
_NOTE = """
if redis.call('LLEN', KEYS[1]) >= tonumber(ARGV[2]) then
  redis.call('LTRIM', KEYS[1], math.floor(tonumber(ARGV[2]) / 4) + 1, -1)
  redis.call('SET', KEYS[2], ARGV[4])
end
if redis.call('EXISTS', KEYS[2]) == 0 then
  redis.call('DEL', KEYS[1])
  redis.call('SET', KEYS[2], ARGV[4])
end
redis.call('RPUSH', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return 1
"""


class RedisStore(AnswerStore):
    """See `AnswerStore`."""

    def __init__(self, url: str, ttl_s: float, most_questions: int, clock: Clock = time.monotonic) -> None:
        try:
            import redis.asyncio as redis
            from redis.exceptions import RedisError
        except ModuleNotFoundError:
            raise ConfigError(f"cache.url: Redis {needs_extra('redis')}") from None
        try:
            self._redis: Any = redis.Redis.from_url(
                url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, max_connections=16
            )
        except ValueError as error:
            raise ConfigError(f"cache.url: {error}") from error
        self._failures = (RedisError, OSError, TimeoutError)
        self._ttl_ms = round(ttl_s * 1000)
        self._most_questions = most_questions
        self._clock = clock
        self._away_until = float("-inf")
        self._note: Any = self._redis.register_script(_NOTE)

    async def get(self, key: CacheKey) -> bytes | None:
        found = await self._try(lambda: self._redis.get(_name("a", key)))
        return bytes(found) if found is not None else None

    async def put(self, key: CacheKey, answer: bytes) -> None:
        await self._try(lambda: self._redis.set(_name("a", key), answer, px=self._ttl_ms))

    async def drop(self, key: CacheKey) -> None:
        await self._try(lambda: self._redis.delete(_name("a", key)))

    async def evict(self, tenant: str | None = None, model: str | None = None) -> int:
        """Raises when Redis is unavailable: an eviction must not fail silently."""
        gone = 0
        pattern = f"{_PREFIX}:*:{_part(tenant)}:{_part(model)}:*"
        try:
            async for name in self._redis.scan_iter(match=pattern, count=1000):
                removed = await self._redis.delete(name)
                gone += removed if _is_answer(name) else 0
        except self._failures as error:
            raise Overloaded(f"The cache's Redis cannot be reached: {error}", retry_after=1.0) from error
        return gone

    async def note(self, partition: CacheKey, question: bytes) -> None:
        keys = [_name("q", partition), _name("e", partition)]
        values = [question, self._most_questions, self._ttl_ms, uuid.uuid4().hex]
        await self._try(lambda: self._note(keys=keys, args=values))

    async def questions(self, partition: CacheKey, epoch: str, seen: int) -> tuple[str, list[bytes]]:
        async def read() -> tuple[str, list[bytes]]:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.get(_name("e", partition))
                pipe.lrange(_name("q", partition), seen, -1)
                found, rest = await pipe.execute()
            now = "" if found is None else found.decode()
            if now != epoch and seen:
                rest = await self._redis.lrange(_name("q", partition), 0, -1)
            return now, rest

        return await self._try(read) or ("", [])

    async def size(self, tenant: str | None = None) -> Size:
        count = total = 0
        try:
            async for name in self._redis.scan_iter(match=f"{_PREFIX}:a:{_part(tenant)}:*", count=1000):
                if _is_answer(name):
                    count += 1
                    total += await self._redis.strlen(name)
        except self._failures as error:
            raise Overloaded(f"The cache's Redis cannot be reached: {error}", retry_after=1.0) from error
        return Size(count, total)

    async def close(self) -> None:
        await self._redis.aclose()

    async def _try(self, work: Any) -> Any:
        if self._clock() < self._away_until:
            return None
        try:
            return await work()
        except self._failures as error:
            if self._away_until == float("-inf") or self._clock() - self._away_until > 60:
                log.warning("response cache is bypassed: its Redis cannot be reached", extra={"why": str(error)})
            self._away_until = self._clock() + AWAY_S
            return None


def _is_answer(name: bytes) -> bool:
    return name.startswith(f"{_PREFIX}:a:".encode()) and f":{_part(NOTES)}:".encode() not in name


def _part(name: str | None) -> str:
    return "*" if name is None else quote(name, safe="")


def _name(kind: str, key: CacheKey) -> str:
    return f"{_PREFIX}:{kind}:{_part(key.tenant)}:{_part(key.model)}:{key.digest}"
