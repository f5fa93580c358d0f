"""Limits counted in Redis or Valkey, shared by several gateways: one script call per reservation and settlement.

A window is a hash from step to amount that expires with the window. A reservation is a key that records in which step
each amount was taken; deleting it makes sure that a settlement happens once. The clock is Redis's own, so gateways
need not agree on the time.

While Redis is unavailable, `fallback` decides: `closed` refuses all requests, `open` counts on this machine, each
gateway (with all its workers) on its own, until Redis is back.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from penstock.limits.base import STEPS, Amounts, Decision, Limit, LimitState, LimitStore, Refusal
from penstock.limits.memory import MemoryLimits
from penstock.protocol.errors import Overloaded
from penstock.storage.redis import RedisCalls, RedisUnavailable, connect

log = logging.getLogger(__name__)

CONNECTIONS = 32
RETRY_S = 1.0

# KEYS: reservation, then one window per limit. ARGV: now in ms or -1 (Redis's clock), steps, the reservation's life in
# seconds, then per limit: amount, most, length of a step in ms. Returns granted, then per limit: used, ms until the
# newest step has left, and, for the first exceeded limit, ms until there is room (-1: never). An existing reservation
# of this name is kept and not taken again, because a call may be sent twice.
_RESERVE = """
local now = tonumber(ARGV[1])
if now < 0 then
  local t = redis.call('TIME')
  now = t[1] * 1000 + math.floor(t[2] / 1000)
end
local steps = tonumber(ARGV[2])
local count = #KEYS - 1
local again = redis.call('EXISTS', KEYS[1]) == 1
local used, fields, granted, blocked, retry = {}, {}, 1, 0, 0
for i = 1, count do
  local length = tonumber(ARGV[3 + 3 * i])
  local first = math.floor(now / length) - steps
  local all = redis.call('HGETALL', KEYS[i + 1])
  local sum, kept = 0, {}
  for j = 1, #all, 2 do
    local step = tonumber(all[j])
    if step < first then
      redis.call('HDEL', KEYS[i + 1], all[j])
    else
      sum = sum + tonumber(all[j + 1])
      kept[#kept + 1] = {step, tonumber(all[j + 1])}
    end
  end
  table.sort(kept, function(a, b) return a[1] < b[1] end)
  used[i], fields[i] = sum, kept
  local amount, most = tonumber(ARGV[1 + 3 * i]), tonumber(ARGV[2 + 3 * i])
  if not again and granted == 1 and (amount > most or sum + amount > most) then
    granted, blocked = 0, i
    if amount > most then
      retry = -1
    else
      local excess = sum + amount - most
      for _, entry in ipairs(kept) do
        excess = excess - entry[2]
        retry = (entry[1] + 1 + steps) * length - now
        if excess <= 0 then break end
      end
    end
  end
end
if granted == 1 and not again then
  local taken = {}
  for i = 1, count do
    local length = tonumber(ARGV[3 + 3 * i])
    local step = math.floor(now / length)
    local amount = tonumber(ARGV[1 + 3 * i])
    redis.call('HINCRBY', KEYS[i + 1], step, amount)
    redis.call('PEXPIRE', KEYS[i + 1], (steps + 2) * length)
    used[i] = used[i] + amount
    taken[#taken + 1] = i
    taken[#taken + 1] = step
    fields[i][#fields[i] + 1] = {step, amount}
  end
  redis.call('HSET', KEYS[1], unpack(taken))
  redis.call('EXPIRE', KEYS[1], tonumber(ARGV[3]))
end
local reply = {granted, blocked, retry}
for i = 1, count do
  local length = tonumber(ARGV[3 + 3 * i])
  local newest = 0
  for _, entry in ipairs(fields[i]) do newest = math.max(newest, (entry[1] + 1 + steps) * length - now) end
  reply[#reply + 1] = used[i]
  reply[#reply + 1] = newest
end
return reply
"""

# KEYS: as above. ARGV per limit: the difference to add (it never subtracts more than was reserved).
_SETTLE = """
local taken = redis.call('HGETALL', KEYS[1])
if #taken == 0 then return 0 end
redis.call('DEL', KEYS[1])
for j = 1, #taken, 2 do
  local i, step = tonumber(taken[j]), taken[j + 1]
  local change = tonumber(ARGV[i])
  if change ~= 0 and redis.call('HEXISTS', KEYS[i + 1], step) == 1 then
    if redis.call('HINCRBY', KEYS[i + 1], step, change) <= 0 then redis.call('HDEL', KEYS[i + 1], step) end
  end
end
return 1
"""


class RedisLimits(LimitStore):
    """See `LimitStore`."""

    def __init__(
        self,
        url: str,
        *,
        fallback: Literal["open", "closed"] = "open",
        prefix: str = "penstock:limits:",
        life_s: int = 3600,
        clock: Callable[[], float] | None = None,
        local: LimitStore | None = None,
    ) -> None:
        """`life_s`: how long a reservation may stay unsettled. `clock`: for tests; Redis's own otherwise. `local`: the
        store used while Redis is unavailable; None: in this process."""
        self._redis = connect(url, "counting limits", CONNECTIONS)
        self._turns = RedisCalls(CONNECTIONS, lambda: RETRY_S)
        self._reserve = self._redis.register_script(_RESERVE)
        self._settle = self._redis.register_script(_SETTLE)
        self._fallback = fallback
        self._prefix = prefix
        self._life_s = life_s
        self._clock = clock
        self._local = local or MemoryLimits()

    @property
    def up(self) -> bool:
        """Whether Redis answered the last call."""
        return self._turns.up

    async def reserve(self, id: str, limits: Sequence[Limit], amounts: Amounts) -> Decision:
        now = -1 if self._clock is None else int(self._clock() * 1000)
        arguments: list[int] = [now, STEPS, self._life_s]
        for limit in limits:
            arguments += [amounts.of(limit.metric), limit.most, round(limit.step_s * 1000)]
        reply = await self._call(self._reserve, self._keys(id, limits), arguments)
        if reply is None:
            return await self._local.reserve(id, limits, amounts)
        granted, blocked, retry, *rest = (int(value) for value in reply)
        states = tuple(
            LimitState(limit, used, reset / 1000)
            for limit, used, reset in zip(limits, rest[::2], rest[1::2], strict=True)
        )
        if granted:
            return Decision(states)
        return Decision(states, Refusal(limits[blocked - 1], None if retry < 0 else retry / 1000))

    async def settle(self, id: str, limits: Sequence[Limit], reserved: Amounts, used: Amounts) -> None:
        changes = [
            (0 if limit.metric == "concurrent" else used.of(limit.metric)) - reserved.of(limit.metric)
            for limit in limits
        ]
        try:
            await self._call(self._settle, self._keys(id, limits), changes)
        except Overloaded:
            log.warning("limit reservation could not be settled; it will expire")
        await self._local.settle(id, limits, reserved, used)

    async def problem(self) -> str | None:
        if self._fallback == "open":
            return None
        try:
            await self._run(self._redis.ping)
        except RedisUnavailable:
            return "Redis, which counts the limits, is unavailable"
        return None

    async def close(self) -> None:
        await self._redis.aclose()

    def _keys(self, id: str, limits: Sequence[Limit]) -> list[str]:
        return [f"{self._prefix}reserved:{id}", *(f"{self._prefix}{limit.subject}" for limit in limits)]

    async def _call(self, script: Any, keys: list[str], arguments: list[int]) -> list[Any] | None:
        """The script's reply; None when Redis is unavailable and limits are counted locally."""
        try:
            reply = await self._run(lambda: script(keys=keys, args=arguments))
        except RedisUnavailable:
            if self._fallback == "closed":
                raise Overloaded("Limits cannot be checked at the moment; try again.", retry_after=RETRY_S) from None
            return None
        return reply if isinstance(reply, list) else []

    async def _run(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """The reply of Redis; logs when it becomes unavailable, and when it is back."""
        was_up = self.up
        try:
            reply = await self._turns.call(ask)
        except RedisUnavailable as error:
            if error.first:
                log.error(_MEANWHILE[self._fallback], extra={"why": str(error)})
            raise
        if not was_up:
            log.info("limits are shared again: Redis is back")
        return reply


_MEANWHILE = {
    "open": "limits are counted by each gateway on its own: Redis is unavailable",
    "closed": "requests are refused: Redis, which counts the limits, is unavailable",
}
