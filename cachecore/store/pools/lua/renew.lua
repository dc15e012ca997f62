-- A run was read: `contract.renewed` on the server.
--
-- KEYS   1 runs   2 worths   3 bytes   4 tails   5 pending
-- ARGV   1 run   2 seconds of a credit   3 how many count at most

local call = redis.call
local worths, name, credit = KEYS[2], ARGV[1], tonumber(ARGV[2])
local tenant = string.match(call('HGET', KEYS[1], name) or '', '^s %d+ (%S+)')
if tenant then
  local clock = call('TIME')
  local now = clock[1] + clock[2] / 1e6
  local worth = tonumber(call('ZSCORE', worths, name) or '0')
  worth = string.format('%.6f', math.min(math.max(worth, now) + credit, now + ARGV[3] * credit))
  call('ZADD', worths, worth, name)
  call('ZADD', worths .. ':' .. tenant, worth, name)
end
return 1
