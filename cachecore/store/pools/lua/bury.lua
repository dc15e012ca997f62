-- Runs whose bytes are gone do not count any more.
--
-- KEYS   1 runs   2 worths   3 bytes   4 tails   5 pending
-- ARGV   1 generation   then for each run: its name, the token of the writing that is gone
-- Answer for each run the end of its file (empty when it was never settled), or nil when it was not this call that
--        buried it.

local call = redis.call
local runs, worths, bytes, tails = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local answer = {}
local known = call('HGET', bytes, 'generation') == ARGV[1]

for index = 2, #ARGV, 2 do
  local name = ARGV[index]
  local entry = known and call('HGET', runs, name)
  local state, size, tenant, token = string.match(entry or '', '^(%l) (%d+) (%S+) %d+ (%x+)$')
  if token == ARGV[index + 1] then
    answer[#answer + 1] = call('HGET', tails, name) or ''
    call('HDEL', runs, name)
    call('HDEL', tails, name)
    call('ZREM', KEYS[5], name)
    call('ZREM', worths, name)
    call('ZREM', worths .. ':' .. tenant, name)
    call('HINCRBY', bytes, 'total', -size)
    if call('HINCRBY', bytes, 'tenant:' .. tenant, -size) == 0 then
      call('HDEL', bytes, 'tenant:' .. tenant)
    end
    if state == 'd' then
      call('HINCRBY', bytes, 'doomed', -size)
      if call('HINCRBY', bytes, 'doomed:' .. tenant, -size) == 0 then
        call('HDEL', bytes, 'doomed:' .. tenant)
      end
    end
  else
    answer[#answer + 1] = false
  end
end
return answer
