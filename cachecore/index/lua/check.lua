-- Whether the server still has what a holder's writer believes it has.
--
-- KEYS   1 the shard's `holders`, then hashes of the holder
-- ARGV   1 holder id   2 fence   3 revision, then how many fields each of these hashes has
-- Answer as of apply.lua

local record = redis.call('HGET', KEYS[1], ARGV[1])
local fence, revision
if record then
  fence, revision = string.match(record, '^(%d+) (%-?%d+) ')
end
if fence and tonumber(fence) > tonumber(ARGV[2]) then
  return {'fenced', fence}
end
if revision ~= ARGV[3] then
  return {'lost', record or ''}
end
for number = 2, #KEYS do
  if redis.call('HLEN', KEYS[number]) ~= tonumber(ARGV[number + 2]) then
    return {'lost', record}
  end
end
return {'ok'}
