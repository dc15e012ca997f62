-- What keys take of the server's memory, together.
--
-- KEYS   of one holder

local bytes = 0
for _, key in ipairs(KEYS) do
  bytes = bytes + (redis.call('MEMORY', 'USAGE', key, 'SAMPLES', '64') or 0)
end
return bytes
