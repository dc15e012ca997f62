-- Delete a run's bytes, unless they are of another writing.
--
-- KEYS   1 the run's value
-- ARGV   1 token of the writing

local token = redis.call('HGET', KEYS[1], 'token')
if token == ARGV[1] then
  redis.call('UNLINK', KEYS[1])
end
return 1
