-- Ask for the lease of a holder's events, renew it, or look who has it.
--
-- KEYS   1 the holder's lease, 2 the shard's `holders`
-- ARGV   1 gateway   2 milliseconds   3 holder id   4 the fence this gateway wrote with last, or 0   5 `1` to have it
-- Answer whether the lease is this gateway's now, its owner or nothing, the record's fence, and the record or nothing
--
-- A new owner's fence goes into the record at once: from then on the one before can write nothing more. Who renews a
-- lease keeps its fence, and so does who comes late and finds that nobody has claimed it meanwhile. Without a record
-- there is nothing left that says so, and everybody begins anew.
--
-- The first write is one that is never refused, so leases live on when the server's memory has run out.

local call = redis.call
local gateway, held = ARGV[1], ARGV[4]
local owner = call('GET', KEYS[1])
local record = call('HGET', KEYS[2], ARGV[3])
local fence, rest
if record then
  fence, rest = string.match(record, '^(%d+)( .+)$')
end

if ARGV[5] ~= '1' or (owner and owner ~= gateway) then
  return {owner == gateway and 1 or 0, owner or '', fence or '0', record or ''}
end
call('HDEL', KEYS[2], '')
call('SET', KEYS[1], gateway, 'PX', ARGV[2])
if fence and fence == held then
  return {1, gateway, fence, record}
end
local now = call('TIME')
local microseconds = now[1] .. string.format('%06d', now[2])
local milliseconds = math.floor(tonumber(microseconds) / 1000)
fence = string.format('%.0f', math.max(tonumber(fence or 0) + 1, milliseconds, tonumber(held)))
record = fence .. (rest or (' ' .. microseconds .. ' -1 - 1 0 -'))
call('HSET', KEYS[2], ARGV[3], record)
return {1, gateway, fence, record}
