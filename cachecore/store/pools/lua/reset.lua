-- Another generation, if the current one is still the one that is to end.
--
-- KEYS   1 runs   2 worths   3 bytes   4 tails   5 pending
-- ARGV   1 the generation that ends (empty: none)   2 the one that begins
-- Answer the current one.

local call = redis.call
local bytes = KEYS[3]
local current = call('HGET', bytes, 'generation')
if (current or '') == ARGV[1] then
  for _, field in ipairs(call('HKEYS', bytes)) do
    local tenant = string.match(field, '^tenant:(.*)$')
    if tenant then
      call('DEL', KEYS[2] .. ':' .. tenant)
    end
  end
  call('UNLINK', KEYS[1], KEYS[2], bytes, KEYS[4], KEYS[5])
  call('HSET', bytes, 'generation', ARGV[2])
  return ARGV[2]
end
return current or ''
