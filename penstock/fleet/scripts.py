"""The Lua scripts of `RedisRegistry`: each is one atomic step, by Redis's own clock, and may be run twice.

Keys: `state` (a hash: id and mark of the registry, counters, the controller), `records`, `loads` (hashes of signed
records) and `leases` (a sorted set: when each record that does not last runs out). Loads change every second, so they
are counted apart and announced to nobody; whoever polls sees them.

Invariant: a lease counts only while processes can renew it. When nobody has been heard of for a while, Redis was away
or stopped, and all leases begin anew.
"""

from __future__ import annotations

_BEGIN = """
local state, records, loads, leases = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, mark, lease, quiet, slack = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function changed()
  redis.call('HINCRBY', state, 'version', 1)
  redis.call('PUBLISH', state, '')
end
-- With the time: a process that begins the registry, and once more after Redis lost its data, begins two.
if redis.call('HSETNX', state, 'id', table.concat({id, time[1], time[2]}, '.')) == 1 then
  redis.call('HSET', state, 'mark', mark)
end
local active = tonumber(redis.call('HGET', state, 'active') or now)
redis.call('HSET', state, 'active', now)
if now - active > quiet then
  for _, key in ipairs(redis.call('ZRANGE', leases, 0, -1)) do redis.call('ZADD', leases, now + lease, key) end
end
local lost = redis.call('ZRANGEBYSCORE', leases, '-inf', now - slack, 'LIMIT', 0, 1000)
for _, key in ipairs(lost) do
  redis.call('HDEL', records, key)
  redis.call('HDEL', loads, key)
  redis.call('ZREM', leases, key)
end
if #lost > 0 then changed() end
"""

READ = (
    _BEGIN
    + """
local known = ARGV[6]
local version, load = redis.call('HGET', state, 'version') or '0', redis.call('HGET', state, 'load') or '0'
local found = redis.call('HMGET', state, 'id', 'mark', 'controller', 'term', 'until')
local leads = found[5] and tonumber(found[5]) > now
local answer = {found[1], found[2], leads and found[3] or '', found[4] or '0', version, load, false, false}
if known ~= found[1] .. ' ' .. version or ARGV[8] ~= answer[3] then answer[7] = redis.call('HGETALL', records) end
if known ~= found[1] .. ' ' .. version or ARGV[7] ~= load then answer[8] = redis.call('HGETALL', loads) end
return answer
"""
)
"""Arguments: the id and version that are known, the number of the known loads, the known controller."""

PUBLISH = (
    _BEGIN
    + """
if redis.call('HGET', state, 'id') ~= ARGV[6] then return 'other' end
if tonumber(ARGV[7]) > 0 and tonumber(ARGV[7]) < tonumber(redis.call('HGET', state, 'term') or 0) then
  return 'term'
end
if redis.call('HLEN', records) + redis.call('HLEN', loads) >= tonumber(ARGV[8]) then return 'full' end
local differs = false
for at = 9, #ARGV, 3 do
  local kind, key, value = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  if kind == 'load' then
    redis.call('HSET', loads, key, value)
    redis.call('HINCRBY', state, 'load', 1)
  elseif redis.call('HGET', records, key) ~= value then
    if kind ~= 'restored' or redis.call('HEXISTS', records, key) == 0 then
      redis.call('HSET', records, key, value)
      differs = true
    end
  end
  if kind == 'leased' or kind == 'load' then redis.call('ZADD', leases, now + lease, key) end
end
if differs then changed() end
return 'ok'
"""
)
"""Arguments: the known id, the term of the controller that writes (0: anybody), the most records, then triples of kind
(leased, load, lasting, or restored: only where there is none), key and signed record."""

RENEW = (
    _BEGIN
    + """
local missing = {}
for at = 6, #ARGV do
  local key = ARGV[at]
  if redis.call('HEXISTS', records, key) == 1 or redis.call('HEXISTS', loads, key) == 1 then
    redis.call('ZADD', leases, now + lease, key)
  else
    missing[#missing + 1] = key
  end
end
return missing
"""
)
"""Arguments: keys of records. Returns those that are not there."""

WITHDRAW = (
    _BEGIN
    + """
local gone = 0
for at = 6, #ARGV do
  local key = ARGV[at]
  gone = gone + redis.call('HDEL', records, key)
  if redis.call('HDEL', loads, key) == 1 then redis.call('HINCRBY', state, 'load', 1) end
  redis.call('ZREM', leases, key)
end
if gone > 0 then changed() end
return gone
"""
)

LEAD = (
    _BEGIN
    + """
local holder = ARGV[6]
local found = redis.call('HMGET', state, 'holder', 'until', 'term')
local alive = found[2] and tonumber(found[2]) > now
if alive and found[1] ~= holder then return 0 end
local term = tonumber(found[3] or 0)
if not alive or found[1] ~= holder then
  -- By the clock, so that terms go on growing where Redis has lost its data.
  term = math.max(term + 1, now)
  redis.call('HSET', state, 'holder', holder, 'controller', ARGV[7], 'term', string.format('%.0f', term))
  changed()
end
redis.call('HSET', state, 'until', string.format('%.0f', now + lease))
return string.format('%.0f', term)
"""
)
"""Arguments: the holder as this process, and its name."""

MARK = _BEGIN + "return redis.call('HSET', state, 'mark', ARGV[6])"

RESIGN = (
    _BEGIN
    + """
if redis.call('HGET', state, 'holder') == ARGV[6] then
  redis.call('HDEL', state, 'holder', 'until', 'controller')
  changed()
end
return 1
"""
)
