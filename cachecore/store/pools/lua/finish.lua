-- The last chunk is written: the run can be found.
--
-- KEYS   1 the run's value
-- ARGV   1 token of this writing   2 how many chunks it has   3 the end of its file   4 milliseconds until it expires
-- Answer 1, or 0 when a part of it is gone.

local call = redis.call
local value = KEYS[1]
if call('HGET', value, 'token') ~= ARGV[1] or call('HLEN', value) ~= ARGV[2] + 1 then
  return 0
end
call('HSET', value, 'tail', ARGV[3])
call('PEXPIRE', value, ARGV[4])
return 1
