-- What nobody reads, and what writers and removers have left that did not come to an end.
--
-- KEYS   1 runs   2 worths   3 bytes   4 tails   5 pending
-- ARGV   1 seconds after which a run is idle   2 seconds after which a writer is taken for dead   3 how many at most
-- Answer run, token, reason of each.

local call = redis.call
local runs = KEYS[1]
local now = tonumber(call('TIME')[1])
local due = {}

local function gather(ranked, seconds, reason)
  local some = call('ZRANGEBYSCORE', ranked, '-inf', string.format('(%.6f', now - seconds), 'LIMIT', 0, ARGV[3])
  for _, name in ipairs(some) do
    local token = string.match(call('HGET', runs, name) or '', '(%x+)$')
    if token then
      due[#due + 1] = name
      due[#due + 1] = token
      due[#due + 1] = reason
    else
      call('ZREM', ranked, name)
    end
  end
end

gather(KEYS[5], tonumber(ARGV[2]), 'bound')
gather(KEYS[2], tonumber(ARGV[1]), 'idle')
return due
