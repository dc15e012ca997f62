-- Everything the server has of a holder, at one moment.
--
-- KEYS   1 the shard's `holders`, 2 the holder's namings
-- ARGV   1 holder id
-- Answer nothing where there is no such holder; else its record, for each place its code, runs and copies, and namings.
--        Of a holder that is being restated only the record.
--
-- The keys of its places follow from the record and lie in the same slot.

local call = redis.call
local record = call('HGET', KEYS[1], ARGV[1])
if not record then
  return false
end
local revision, codes = string.match(record, '^%d+ (%-?%d+) %-?%d+ ([%l-]+)')
if not revision or revision == '-1' then
  return {record, {}, {}}
end
local shard = string.sub(KEYS[1], 1, -8)
local places = {}
for code in string.gmatch(codes, '%l') do
  local suffix = ARGV[1] .. ':' .. code
  places[#places + 1] = {code, call('HGETALL', shard .. 'runs:' .. suffix), call('HGETALL', shard .. 'copies:' .. suffix)}
end
return {record, places, call('HGETALL', KEYS[2])}
