-- One turn of a gateway at the directory of workers.
--
-- KEYS[1]  HASH worker name -> JSON {url, further settings, until_ms} or {removed: true, expired, until_ms}
-- ARGV     lease in ms | how many entries follow | for each: name, "put" or "offer", JSON |
--          the names of workers that the gateway finds well
--
-- "offer" leaves what is there as it is. A lease that nobody renewed ends in a removal, and a removal is kept as long as
-- a lease, so that everyone hears of it: an entry that is merely absent was lost, not removed.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local lease = tonumber(ARGV[1])

local function write(name, entry, ends)
  entry.until_ms = ends
  redis.call('HSET', KEYS[1], name, cjson.encode(entry))
end

local position = 3
for _ = 1, tonumber(ARGV[2]) do
  local name, mode = ARGV[position], ARGV[position + 1]
  if mode == 'put' or redis.call('HEXISTS', KEYS[1], name) == 0 then
    write(name, cjson.decode(ARGV[position + 2]), now + lease)
  end
  position = position + 3
end

local well = {}
for index = position, #ARGV do
  well[ARGV[index]] = true
end

local entries = redis.call('HGETALL', KEYS[1])
for index = 1, #entries, 2 do
  local name = entries[index]
  local sound, entry = pcall(cjson.decode, entries[index + 1])
  local ends = sound and type(entry) == 'table' and tonumber(entry.until_ms)
  if not ends then
    -- another version's, perhaps: not ours to touch
  elseif well[name] and not entry.removed then
    if ends - now < lease * 0.8 then
      write(name, entry, now + lease)
    end
  elseif ends <= now and entry.removed then
    redis.call('HDEL', KEYS[1], name)
  elseif ends <= now then
    write(name, {removed = true, expired = true}, now + lease)
  end
end
return redis.status_reply('OK')
