-- One chunk of a run that is being written. Until `finish` nobody finds it, and it expires if `finish` never comes.
--
-- KEYS   1 the run's value
-- ARGV   1 token of this writing   2 number of the chunk   3 chunk   4 milliseconds until it expires
-- Answer 1, or 0 when what was written before is gone.

local call = redis.call
local value, token = KEYS[1], ARGV[1]
if ARGV[2] == '0' then
  call('UNLINK', value)
  call('HSET', value, 'token', token)
elseif call('HGET', value, 'token') ~= token then
  return 0
end
call('HSET', value, ARGV[2], ARGV[3])
call('PEXPIRE', value, ARGV[4])
return 1
