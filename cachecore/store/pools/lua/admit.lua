-- May a run be written? If so it is counted from now on; if not, what must go first.
--
-- KEYS   1 runs   2 worths   3 bytes   4 tails   5 pending                (see redis.py)
-- ARGV   1 generation   2 run   3 size   4 tenant   5 bytes the pool may hold   6 bytes the tenant may hold
--        7 token of this writing   8 seconds after which another writer is taken for dead
-- Answer `admitted`, `present`, `busy` (another one writes it), `wait` (others are removing enough already),
--        `over` and the current generation, or `victims` with run, token, reason of each: dooms them, they still count.
--
-- A tenant's own worths are in a key beside the pool's, in the same slot.

local call = redis.call
local runs, worths, bytes, pending = KEYS[1], KEYS[2], KEYS[3], KEYS[5]
local generation, name, size, tenant = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local token, dead = ARGV[7], tonumber(ARGV[8])
local VICTIMS_MAX, STEP = 256, 64

local current = call('HGET', bytes, 'generation')
if current ~= generation then
  return {'over', current or ''}
end
local clock = call('TIME')
local now = tonumber(clock[1])

local function parse(entry)
  local state, held, owner, since, writing = string.match(entry, '^(%l) (%d+) (%S+) (%d+) (%x+)$')
  return state, tonumber(held or 0), owner, tonumber(since or 0), writing
end

local function number(field)
  return tonumber(call('HGET', bytes, field) or '0')
end

local entry = call('HGET', runs, name)
if entry then
  local state, held, owner, since, writing = parse(entry)
  if state == 's' then
    return {'present'}
  elseif state == 'd' or since + dead <= now then
    return {'victims', name, writing, 'bound'}
  end
  return {'busy'}
end

local victims = {'victims'}

local function doom(ranked, over, reason)
  local start = 0
  while over > 0 and #victims < 3 * VICTIMS_MAX do
    local some = call('ZRANGE', ranked, start, start + STEP - 1)
    if #some == 0 then
      return
    end
    for _, victim in ipairs(some) do
      local found = over > 0 and call('HGET', runs, victim)
      if found then
        local state, held, owner, since, writing = parse(found)
        call('HSET', runs, victim, string.format('d %d %s %d %s', held, owner, now, writing))
        call('ZADD', pending, now, victim)
        call('ZREM', worths, victim)
        call('ZREM', worths .. ':' .. owner, victim)
        call('HINCRBY', bytes, 'doomed', held)
        call('HINCRBY', bytes, 'doomed:' .. owner, held)
        over = over - held
        victims[#victims + 1] = victim
        victims[#victims + 1] = writing
        victims[#victims + 1] = reason
      elseif over > 0 then
        call('ZREM', ranked, victim)
      end
    end
  end
end

local bytes_max, quota = tonumber(ARGV[5]), tonumber(ARGV[6])
local total, held = number('total'), number('tenant:' .. tenant)
if quota >= bytes_max then
  quota = math.huge
end
if held + size > quota then
  doom(worths .. ':' .. tenant, held - number('doomed:' .. tenant) + size - quota, 'quota')
end
if total + size > bytes_max then
  doom(worths, total - number('doomed') + size - bytes_max, 'bound')
end
if #victims > 1 then
  return victims
end
if held + size > quota or total + size > bytes_max then
  -- Enough is doomed already. Where whoever doomed it takes long over it, this writer does it as well: no harm is done.
  for _, name in ipairs(call('ZRANGEBYSCORE', pending, '-inf', now - 2, 'LIMIT', 0, STEP)) do
    local state, held, owner, since, writing = parse(call('HGET', runs, name) or '')
    if state == 'd' then
      victims[#victims + 1] = name
      victims[#victims + 1] = writing
      victims[#victims + 1] = 'bound'
    end
  end
  return #victims > 1 and victims or {'wait'}
end
call('HSET', runs, name, string.format('w %d %s %d %s', size, tenant, now, token))
call('ZADD', pending, now, name)
call('HINCRBY', bytes, 'total', size)
call('HINCRBY', bytes, 'tenant:' .. tenant, size)
return {'admitted'}
