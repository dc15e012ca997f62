-- How deep each place of each holder serves a chain that starts at block 0.
--
-- KEYS   the `holders` hash of each shard that is asked
-- ARGV   the chain: 16 bytes a name
-- Answer (holder id, place codes, depth of each) for each holder that serves any of it
--
-- A piece is found by its first name. Names are chained, so one equal name proves all before it, and a piece that
-- continues where another has ended is found by the next name of the chain. Of a holder with several places each may go
-- on in the middle of what another has: there, pieces that begin between what was looked at have to be looked for.

local call, sub, byte = redis.call, string.sub, string.byte
local NAME, LASTS, CHUNK, BATCH = 16, 21, 42, 512

local chain = ARGV[1]
local total = math.floor(#chain / NAME)
local names = setmetatable({}, {
  __index = function(known, position)
    local name = sub(chain, (position - 1) * NAME + 1, position * NAME)
    known[position] = name
    return name
  end,
})

-- How many blocks of the chain from `position` on (0 is the first) the piece has whose head was found there. The head has
-- the last name of each chunk, so unless the chain ends or turns off within the piece it is enough, and otherwise one of
-- the chunks decides.
local function shared(runs, head, position)
  local low, high = byte(head, 1, 2)
  local blocks = low + 256 * high
  if position + blocks <= total and sub(head, -NAME) == names[position + blocks] then
    return blocks
  end
  local chunk, most = 0, math.min(blocks, total - position)
  while (chunk + 1) * CHUNK <= most do
    local at = LASTS + chunk * NAME
    if sub(head, at + 1, at + NAME) ~= names[position + (chunk + 1) * CHUNK] then
      break
    end
    chunk = chunk + 1
  end
  local before = chunk * CHUNK
  local listed = before < most and call('HGET', runs, names[position + 1] .. string.char(chunk))
  if not listed then
    return before
  end
  low, high = 0, math.min(CHUNK, most - before)
  while low < high do
    local middle = math.ceil((low + high) / 2)
    if sub(listed, (middle - 1) * NAME + 1, middle * NAME) == names[position + before + middle] then
      low = middle
    else
      high = middle - 1
    end
  end
  return before + low
end

local function depth_of_one(runs)
  local depth = 0
  while depth < total do
    local head = call('HGET', runs, names[depth + 1])
    local blocks = head and shared(runs, head, depth) or 0
    if blocks == 0 then
      break
    end
    depth = depth + blocks
  end
  return depth
end

-- Several places: what each has of the chain, as far as it was asked for. `scanned` blocks have been looked at; `starts`
-- and `stops` bound the stretches found.

local function slice(from, upto)
  local asked = {}
  for position = from, upto do
    asked[#asked + 1] = names[position]
  end
  return asked
end

local function scan(place, position)
  while place.scanned <= position do
    local from = place.scanned
    local upto = math.min(position, from + BATCH - 1)
    local heads = call('HMGET', place.runs, unpack(slice(from + 1, upto + 1)))
    place.scanned = upto + 1
    for offset, head in ipairs(heads) do
      if head then
        local start = from + offset - 1
        local stop = start + shared(place.runs, head, start)
        place.starts[#place.starts + 1], place.stops[#place.stops + 1] = start, stop
        place.scanned = math.max(place.scanned, stop)
      end
    end
  end
end

-- Where the stretch ends in which the place holds block `position`; nil where it does not.
local function stop_of(place, position)
  scan(place, position)
  for number = #place.starts, 1, -1 do
    if place.starts[number] <= position then
      return position < place.stops[number] and place.stops[number] or nil
    end
  end
  return nil
end

local function layered_depth(place, places)
  local depth = 0
  while depth < total do
    local stop = stop_of(place, depth)
    for _, other in ipairs(places) do
      stop = stop or (other.tier <= place.tier and other.fidelity <= place.fidelity and stop_of(other, depth))
    end
    if not stop then
      break
    end
    depth = stop
  end
  if depth > 0 and #place.starts == 0 then
    scan(place, depth - 1)
  end
  return #place.starts > 0 and place.starts[1] < depth and depth or 0
end

local function depths_of(prefix, codes)
  local places = {}
  for number = 1, #codes do
    local layer = byte(codes, number) - 97
    places[number] = {
      runs = prefix .. sub(codes, number, number),
      tier = math.floor(layer / 4),
      fidelity = layer % 4,
      scanned = 0,
      starts = {},
      stops = {},
    }
  end
  local found, depths = {}, {}
  for number, place in ipairs(places) do
    local depth = layered_depth(place, places)
    if depth > 0 then
      found[#found + 1], depths[#depths + 1] = sub(codes, number, number), depth
    end
  end
  return table.concat(found), depths
end

local answer = {}
for _, key in ipairs(KEYS) do
  local shard = sub(key, 1, -8) .. 'runs:'
  local records = call('HGETALL', key)
  for at = 1, #records, 2 do
    local id = records[at]
    local codes = string.match(records[at + 1], '^%d+ %-?%d+ %-?%d+ (%l+)')
    if codes and #codes == 1 then
      local depth = depth_of_one(shard .. id .. ':' .. codes)
      if depth > 0 then
        answer[#answer + 1] = {id, codes, depth}
      end
    elseif codes then
      local found, depths = depths_of(shard .. id .. ':', codes)
      if found ~= '' then
        answer[#answer + 1] = {id, found, unpack(depths)}
      end
    end
  end
end
return answer
