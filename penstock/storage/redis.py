"""Connections to Redis or Valkey for state that gateways share: limits and queues.

`RedisCalls` tells apart two things that look alike from inside a call: Redis does not answer, or the gateway was too
busy to read the answer. Calls beyond the number of connections wait here for a free one; that wait says nothing about
Redis. A call that timed out is sent once more, because its reply may have been waiting unread, so every script called
through this class must be safe to run twice. While Redis is unavailable, one call at a time probes it and all others
fail at once with `RedisUnavailable`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from penstock.errors import ConfigError, needs_extra

TIMEOUT_S = 1.0
"""Time limit for a connection or a reply."""
RETRY_S = 1.0
"""How often Redis is probed while it is unavailable."""
T = TypeVar("T")


class RedisUnavailable(Exception):
    """Redis is unavailable. `first`: whether this call detected it."""

    def __init__(self, why: str, *, first: bool = False) -> None:
        super().__init__(why)
        self.first = first


def connect(url: str, what: str, connections: int) -> Any:
    """A client that connects on first use. `what`: its purpose, for the error when the driver is missing."""
    try:
        from redis.asyncio import BlockingConnectionPool, Redis
    except ImportError as error:
        raise ConfigError(f"{what}: Redis {needs_extra('redis')}") from error
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=TIMEOUT_S,
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        retry_on_timeout=True,
    )
    return Redis.from_pool(pool)


class RedisCalls:
    """Runs calls to one Redis, at most one per connection, and tracks its availability."""

    def __init__(self, connections: int, retry_s: Callable[[], float] = lambda: RETRY_S) -> None:
        self._free = asyncio.Semaphore(connections)
        self._retry_s = retry_s
        self._try_at = 0.0
        self._trying = False
        self.up = True

    async def call(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The result of `ask`; `RedisUnavailable` when Redis does not answer, or is known to be unavailable."""
        from redis.exceptions import RedisError

        self._check()
        async with self._free:
            self._check()  # it may have become unavailable while this call waited
            probe = not self.up
            self._trying = self._trying or probe
            try:
                answer = await ask()
            except (RedisError, OSError, TimeoutError) as error:
                first, self.up = self.up, False
                self._try_at = time.monotonic() + self._retry_s()
                raise RedisUnavailable(str(error) or type(error).__name__, first=first) from error
            finally:
                if probe:
                    self._trying = False
            self.up = True
            return answer

    def _check(self) -> None:
        if not self.up and (self._trying or time.monotonic() < self._try_at):
            raise RedisUnavailable("it did not answer recently")
