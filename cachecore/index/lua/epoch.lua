-- The life that a worker is in, for engines that have no word for it themselves.
--
-- KEYS   the shard's `epochs` hash
-- ARGV   worker name; the last life that the caller knows to be over (0: none)
-- Answer the present life, later than that one. Whoever saw the same life end gets the same answer.

local present = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or 0)
local over = tonumber(ARGV[2])
if present <= over then
  present = over + 1
  redis.call('HSET', KEYS[1], ARGV[1], string.format('%d', present))
end
return present
