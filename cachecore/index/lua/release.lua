-- Give back the lease of a holder's events, if it is this gateway's.
--
-- KEYS   1 the holder's lease
-- ARGV   1 gateway

if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('UNLINK', KEYS[1])
end
return 0
