-- The records of all holders of some shards: a `holders` hash for each key, listed.

local answer = {}
for number, key in ipairs(KEYS) do
  answer[number] = redis.call('HGETALL', key)
end
return answer
