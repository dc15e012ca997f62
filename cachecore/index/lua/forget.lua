-- The holder is gone: unlink whatever it may have and tell the mirrors.
--
-- KEYS   1 the shard's `holders`, 2 its `stream`, then every key that the holder may have
-- ARGV   1 holder id   2 fence   3 revision   4 entries the stream keeps
-- Answer `ok`; `fenced` and the fence of a later writer
--
-- The first write frees memory, so this goes through when there is none left.

local call = redis.call
local holders, stream = KEYS[1], KEYS[2]
local id, fence = ARGV[1], ARGV[2]

local record = call('HGET', holders, id)
local stored = record and string.match(record, '^(%d+) ')
if stored and tonumber(stored) > tonumber(fence) then
  return {'fenced', stored}
end
call('HDEL', holders, id)
call('UNLINK', unpack(KEYS, 3))
call('XADD', stream, 'MAXLEN', '~', ARGV[4], '*', 'h', id, 'f', fence, 'r', ARGV[3], 'q', '-1', 'k', 'f', 'e', '')
return {'ok'}
