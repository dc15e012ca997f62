-- Where a shard's stream ends, and the records of all its holders at the same moment.
-- KEYS: stream, holders.  Answer: {id of the last entry ever added, {holder id, record, ...}}
local last = '0-0'
if redis.call('EXISTS', KEYS[1]) == 1 then
  local facts = redis.call('XINFO', 'STREAM', KEYS[1])
  for at = 1, #facts, 2 do
    if facts[at] == 'last-generated-id' then
      last = facts[at + 1]
    end
  end
end
return {last, redis.call('HGETALL', KEYS[2])}
