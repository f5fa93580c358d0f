-- The fair queue in Redis: the same rules as fair_queue.py, checked by the same tests.
-- KEYS: the queue's prefix. ARGV: operation, now in seconds (-1: Redis's clock), gateway, slots (`N strict`: they also
-- limit an entry that would run alone), KV tokens, maximum
-- number of waiting entries (-1: no limit), order, ageing in seconds, seconds after which a silent gateway counts as
-- dead, tenant and rank whose state is returned, then the operation's own arguments.
-- Redis keys: s state; e entries; age and cost: waiting entries; f:RANK waiting entries of a class; q:RANK:TENANT of a
-- tenant; c:RANK virtual counters of tenants; for tenants that wait: a:RANK counters, n:RANK waiting work, m:RANK
-- weights, l:RANK work by weight; gw gateways by last heartbeat; g:GATEWAY entries of a gateway.
local P, op, now, gateway = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3]
local slots, kv, most = tonumber(string.match(ARGV[4], '^-?%d+')), tonumber(ARGV[5]), tonumber(ARGV[6])
local strict = string.find(ARGV[4], 'strict') ~= nil
local order, ageing, dead = ARGV[7], tonumber(ARGV[8]), tonumber(ARGV[9])
local EVERY, FADE, SETTLED, STEP, LEAST, COUNTERS = 10, 20, 0.5, 0.1, 0.02, 4096
if now < 0 then
  local t = redis.call('TIME')
  now = tonumber(t[1]) + tonumber(t[2]) / 1e6
end
local state = P .. 's'
local S = {}
local raw = redis.call('HGETALL', state)
for i = 1, #raw, 2 do S[raw[i]] = tonumber(raw[i + 1]) end
local function s(name) return S[name] or 0 end
local touched = {}
local function set(name, value) S[name] = value; touched[name] = true end
local granted, dropped = {}, {}

local function pack(e) return cmsgpack.pack(e) end
local function load(id)
  local found = redis.call('HGET', P .. 'e', id)
  return found and cmsgpack.unpack(found)
end
local function num(x) return string.format('%.17g', x) end
local function key(name, rank) return P .. name .. ':' .. rank end

-- The drain rate: see rate.py.
local function pass()
  local since = S.since
  if not since or since < 0 or now <= since then return end
  local kept = math.exp(-(now - since) / FADE)
  for _, name in ipairs({'work0', 'work1', 'work2'}) do set(name, s(name) * kept) end
  set('busy', s('busy') * kept + FADE * (1 - kept))
  set('since', now)
end
local function busy(is) pass(); set('since', is and now or -1) end

local function counter(e, value)
  redis.call('ZADD', key('c', e.rank), num(value), e.tenant)
  redis.call('ZADD', key('a', e.rank), 'XX', num(value), e.tenant)
end
local function read(e) return tonumber(redis.call('ZSCORE', key('c', e.rank), e.tenant) or 'nan') end
local function lift(e)
  local known, floor = read(e), s('v' .. e.rank)
  if known ~= known or known < floor then counter(e, floor) end
end
local function charge(e, cost)
  local known, floor = read(e), s('v' .. e.rank)
  if known ~= known then known = floor end
  counter(e, known + cost / e.weight)
  if redis.call('ZCARD', key('c', e.rank)) > COUNTERS then
    for _, name in ipairs(redis.call('ZRANGEBYSCORE', key('c', e.rank), '-inf', num(floor))) do
      if not redis.call('ZSCORE', key('a', e.rank), name) then redis.call('ZREM', key('c', e.rank), name) end
    end
  end
end
local function hold(e)
  e.at = now
  redis.call('HSET', P .. 'e', e.id, pack(e))
  redis.call('SADD', P .. 'g:' .. e.gateway, e.id)
  set('inflight', s('inflight') + e.slots)
  set('kv', s('kv') + e.kv)
  set('cost', s('cost') + e.cost)
end
local function take(e)
  set('v' .. e.rank, math.max(s('v' .. e.rank), read(e)))
  charge(e, e.cost)
  hold(e)
  set('grants', s('grants') + 1)
  if not S.first then set('first', now) end
end
local function fits(e)
  if s('inflight') <= 0 then return not strict or slots < 0 or e.slots <= slots end
  return (slots < 0 or s('inflight') + e.slots <= slots) and (kv < 0 or s('kv') + e.kv <= kv)
end
local function waiting() return s('q0') + s('q1') + s('q2') end

local function push(e)
  if waiting() == 0 then busy(true) end
  local r = e.rank
  if not redis.call('ZSCORE', key('a', r), e.tenant) then
    lift(e)
    redis.call('ZADD', key('a', r), num(read(e)), e.tenant)
    redis.call('HSET', key('m', r), e.tenant, num(e.weight))
    set('t' .. r, s('t' .. r) + e.weight)
  end
  redis.call('HSET', P .. 'e', e.id, pack(e))
  redis.call('SADD', P .. 'g:' .. e.gateway, e.id)
  redis.call('ZADD', P .. 'age', num(e.arrived), e.id)
  redis.call('ZADD', P .. 'cost', num(e.cost), e.id)
  redis.call('ZADD', key('f', r), num(e.arrived), e.id)
  redis.call('ZADD', key('q', r) .. ':' .. e.tenant, num(e.arrived), e.id)
  local own = tonumber(redis.call('HGET', key('n', r), e.tenant) or '0') + e.cost
  redis.call('HSET', key('n', r), e.tenant, num(own))
  redis.call('ZADD', key('l', r), num(own / tonumber(redis.call('HGET', key('m', r), e.tenant))), e.tenant)
  set('q' .. r, s('q' .. r) + 1)
  set('w' .. r, s('w' .. r) + e.cost)
end
local function pull(e)
  local r = e.rank
  redis.call('HDEL', P .. 'e', e.id)
  redis.call('SREM', P .. 'g:' .. e.gateway, e.id)
  redis.call('ZREM', P .. 'age', e.id)
  redis.call('ZREM', P .. 'cost', e.id)
  redis.call('ZREM', key('f', r), e.id)
  redis.call('ZREM', key('q', r) .. ':' .. e.tenant, e.id)
  local weight = tonumber(redis.call('HGET', key('m', r), e.tenant))
  set('q' .. r, s('q' .. r) - 1)
  set('w' .. r, s('w' .. r) - e.cost)
  if redis.call('ZCARD', key('q', r) .. ':' .. e.tenant) == 0 then
    redis.call('ZREM', key('a', r), e.tenant)
    redis.call('ZREM', key('l', r), e.tenant)
    redis.call('HDEL', key('n', r), e.tenant)
    redis.call('HDEL', key('m', r), e.tenant)
    set('t' .. r, s('t' .. r) - weight)
  else
    local own = tonumber(redis.call('HGET', key('n', r), e.tenant)) - e.cost
    redis.call('HSET', key('n', r), e.tenant, num(own))
    redis.call('ZADD', key('l', r), num(own / weight), e.tenant)
  end
  if s('q' .. r) == 0 then set('w' .. r, 0); set('t' .. r, 0) end
  if waiting() == 0 then busy(false) end
end
local function first(name) return redis.call('ZRANGE', name, 0, 0)[1] end
local function next_entry()
  if order == 'fcfs' then return load(first(P .. 'age')) end
  if s('grants') % EVERY == EVERY - 1 then
    local oldest = load(first(P .. 'age'))
    if now - oldest.arrived > ageing then return oldest end
  end
  if order == 'sjf' then return load(first(P .. 'cost')) end
  local r = s('q0') > 0 and 0 or (s('q1') > 0 and 1 or 2)
  if order == 'priority' then return load(first(key('f', r))) end
  return load(first(key('q', r) .. ':' .. first(key('a', r))))
end
local function tell(e, word)
  if e.gateway ~= gateway then redis.call('PUBLISH', P .. 'told:' .. e.gateway, word .. e.id) end
end
local function grant()
  while waiting() > 0 do
    local e = next_entry()
    if not fits(e) then return end
    pass()
    set('work' .. e.rank, s('work' .. e.rank) + e.cost)
    pull(e)
    take(e)
    granted[#granted + 1] = e.id
    tell(e, '+')
  end
end
local function drop(e)
  redis.call('HDEL', P .. 'e', e.id)
  redis.call('SREM', P .. 'g:' .. e.gateway, e.id)
  set('inflight', s('inflight') - e.slots)
  set('kv', s('kv') - e.kv)
  set('cost', s('cost') - e.cost)
end
local function release(e, used)
  drop(e)
  charge(e, used - e.cost)
  if used > 0 then
    local mean = s('service')
    set('service', mean + (mean > 0 and STEP or 1) * ((now - e.at) - mean))
  end
end
local function leave(e)
  if e.at then release(e, 0) else pull(e) end
end
local function entry(at)
  local e = {
    id = ARGV[at], tenant = ARGV[at + 1], rank = tonumber(ARGV[at + 2]), weight = tonumber(ARGV[at + 3]),
    cost = tonumber(ARGV[at + 4]), kv = tonumber(ARGV[at + 5]), slots = tonumber(ARGV[at + 6]),
    arrived = now - tonumber(ARGV[at + 7]), gateway = gateway,
  }
  return e
end

local known = redis.call('ZSCORE', P .. 'gw', gateway) and 1 or 0
if op == 'enter' then
  local e, before = entry(12), load(ARGV[12])
  if before then
    if before.at then granted[1] = before.id end
  elseif waiting() == 0 and fits(e) then
    lift(e)
    take(e)
    granted[1] = e.id
  else
    push(e)
    grant()
    if most >= 0 and waiting() > most then
      local r = s('q2') > 0 and 2 or (s('q1') > 0 and 1 or 0)
      local tenant = redis.call('ZREVRANGE', key('l', r), 0, 0)[1]
      local victim = load(redis.call('ZREVRANGE', key('q', r) .. ':' .. tenant, 0, 0)[1])
      pull(victim)
      dropped[1] = victim.id
      tell(victim, '-')
    end
  end
elseif op == 'leave' or op == 'release' then
  local e = load(ARGV[12])
  if e then
    if op == 'leave' then leave(e) elseif e.at then release(e, tonumber(ARGV[13])) end
    grant()
  end
elseif op == 'restore' then
  -- All entries of a gateway, after Redis lost its data or was unreachable: remove the old ones, then add these.
  for _, id in ipairs(redis.call('SMEMBERS', P .. 'g:' .. gateway)) do
    local e = load(id)
    if e and e.at then drop(e) elseif e then pull(e) end
  end
  for at = 12, #ARGV, 9 do
    local e = entry(at)
    if ARGV[at + 8] == '1' then hold(e) else push(e) end
  end
  known = 1
  grant()
elseif op == 'bye' then
  for _, id in ipairs(redis.call('SMEMBERS', P .. 'g:' .. gateway)) do
    local e = load(id)
    if e then leave(e) end
  end
  redis.call('ZREM', P .. 'gw', gateway)
  known = 0
  grant()
elseif op == 'tick' then
  for _, other in ipairs(redis.call('ZRANGEBYSCORE', P .. 'gw', '-inf', num(now - dead))) do
    if other ~= gateway then
      for _, id in ipairs(redis.call('SMEMBERS', P .. 'g:' .. other)) do
        local e = load(id)
        if e then leave(e) end
      end
      redis.call('DEL', P .. 'g:' .. other)
      redis.call('ZREM', P .. 'gw', other)
    end
  end
  grant()
  -- A message may have been lost: report again which of the gateway's waiting entries were granted or are gone.
  for at = 12, known == 1 and #ARGV or 0 do
    local e = load(ARGV[at])
    if e and e.at then granted[#granted + 1] = e.id elseif not e then dropped[#dropped + 1] = ARGV[at] end
  end
end
if known == 1 or op == 'enter' then redis.call('ZADD', P .. 'gw', num(now), gateway) end
local arguments = {}
for name in pairs(touched) do
  arguments[#arguments + 1] = name
  arguments[#arguments + 1] = num(S[name])
end
if #arguments > 0 then redis.call('HSET', state, unpack(arguments)) end

pass()
local rates = {'nan', 'nan', 'nan'}
local total = s('work0') + s('work1') + s('work2')
if s('busy') >= SETTLED and total > 0 then
  total = total / s('busy')
  rates = {num(total), num(math.max((s('work1') + s('work2')) / s('busy'), LEAST * total)),
           num(math.max(s('work2') / s('busy'), LEAST * total))}
else
  local service = s('service')
  if service == 0 and S.first then service = now - S.first end
  if service >= SETTLED and s('cost') > 0 then
    total = num(s('cost') / service)
    rates = {total, total, total}
  end
end
local tenant, rank = ARGV[10], ARGV[11]
local value = tonumber(redis.call('ZSCORE', key('c', rank), tenant) or '0')
local newest = redis.call('ZREVRANGE', key('q', rank) .. ':' .. tenant, 0, 0, 'WITHSCORES')[2]
return {
  known, granted, dropped, num(s('inflight')), num(s('kv')), num(s('q0')), num(s('q1')), num(s('q2')),
  num(s('w0')), num(s('w1')), num(s('w2')), rates[1], rates[2], rates[3],
  redis.call('HGET', key('n', rank), tenant) or '0',
  num(s('t' .. rank)), num(math.max(value - s('v' .. rank), 0)), newest and num(now - tonumber(newest)) or 'nan',
}
