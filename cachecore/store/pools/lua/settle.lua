-- A run has been written: it may be found and evicted from now on.
--
-- KEYS   1 runs   2 worths   3 bytes   4 tails   5 pending
-- ARGV   1 generation   2 run   3 token of this writing   4 the end of its file, which describes it
-- Answer 1, or 0 when it is not wanted any more.

local call = redis.call
local runs, worths, name = KEYS[1], KEYS[2], ARGV[2]

if call('HGET', KEYS[3], 'generation') ~= ARGV[1] then
  return 0
end
local entry = call('HGET', runs, name)
local size, tenant, token = string.match(entry or '', '^w (%d+) (%S+) %d+ (%x+)$')
if token ~= ARGV[3] then
  return 0
end
local clock = call('TIME')
local now = string.format('%d.%06d', clock[1], clock[2])
call('HSET', runs, name, string.format('s %s %s %d %s', size, tenant, clock[1], token))
call('ZADD', worths, now, name)
call('ZADD', worths .. ':' .. tenant, now, name)
call('HSET', KEYS[4], name, ARGV[4])
call('ZREM', KEYS[5], name)
return 1
