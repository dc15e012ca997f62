-- How deep each place of each holder serves a chain that starts at block 0.
--
-- KEYS   the `holders` hash of each shard that is asked
-- ARGV   the chain: 16 bytes a name
-- Answer holder id, place code, depth of each place that serves any of it, in one list
--
-- A piece is found by its first name. Names are chained, so one equal name proves all before it, and a piece that
-- continues where another has ended is found by the next name of the chain. Of a holder with several places each may go
-- on in the middle of what another has: there, pieces that begin between what was looked at have to be looked for, unless
-- the record says that the place is rooted. A call does so for as many names as ASKED_MAX (0.2 us each); from then on it
-- finds only what begins where something else ends, and a depth may come out short.

local call, sub, byte, match = redis.call, string.sub, string.byte, string.match
local NAME, LASTS, CHUNK, BATCH, ASKED_MAX = 16, 21, 42, 512, 8192

local chain = ARGV[1]
local total = math.floor(#chain / NAME)

-- The name at `position`, of which 0 is the first.
local function name_at(position)
  return sub(chain, position * NAME + 1, (position + 1) * NAME)
end

-- How many blocks of the chain from `position` on (0 is the first) the piece has whose head was found there. The head has
-- the last name of each chunk, so unless the chain ends or turns off within the piece it is enough, and otherwise one of
-- the chunks decides.
local function compare(runs, head, position)
  local low, high = byte(head, 1, 2)
  local blocks = low + 256 * high
  local most = total - position
  if blocks <= most then
    if sub(head, -NAME) == name_at(position + blocks - 1) then
      return blocks
    end
    most = blocks
  end
  -- Whole chunks that are shared: `low`.
  low, high = 0, math.floor(most / CHUNK)
  while low < high do
    local middle = math.floor((low + high + 1) / 2)
    local at = LASTS + middle * NAME
    if sub(head, at - NAME + 1, at) == name_at(position + middle * CHUNK - 1) then
      low = middle
    else
      high = middle - 1
    end
  end
  local before = low * CHUNK
  local listed = before < most and call('HGET', runs, name_at(position) .. string.char(low))
  if not listed then
    return before
  end
  position = position + before
  low, high = 0, math.min(CHUNK, most - before)
  while low < high do
    local middle = math.floor((low + high + 1) / 2)
    if sub(listed, (middle - 1) * NAME + 1, middle * NAME) == name_at(position + middle - 1) then
      low = middle
    else
      high = middle - 1
    end
  end
  return before + low
end

-- The last name of all is in the head as well, so equal heads have equal pieces: what many have is compared once.
local latest_head, latest_blocks = {}, {} -- by position

local function shared(runs, head, position)
  if latest_head[position] ~= head then
    latest_head[position], latest_blocks[position] = head, compare(runs, head, position)
  end
  return latest_blocks[position]
end

local first = name_at(0)

local function depth_of_one(runs)
  local head, depth = call('HGET', runs, first), 0
  while head do
    local blocks = shared(runs, head, depth)
    depth = depth + blocks
    head = blocks > 0 and depth < total and call('HGET', runs, name_at(depth))
  end
  return depth
end

-- Several places: what each has of the chain, as far as it was asked for. `scanned` blocks have been looked at; `starts`
-- and `stops` bound the stretches found.

local names = {} -- the first of the chain's, as many as were needed
local asked = 0 -- so many have been looked for without a reason to be there

local function scan(place, position)
  if place.rooted and place.scanned == 0 then
    place.scanned = total
    local depth = depth_of_one(place.runs)
    if depth > 0 then
      place.starts[1], place.stops[1] = 0, depth
    end
  end
  while place.scanned <= position do
    local from = place.scanned
    local upto = math.min(position, from + BATCH - 1)
    asked = asked + upto - from
    if upto > from and asked > ASKED_MAX then
      return
    end
    for position = #names, upto do
      names[position + 1] = name_at(position)
    end
    local heads = call('HMGET', place.runs, unpack(names, from + 1, upto + 1))
    place.scanned = upto + 1
    for offset = 1, #heads do
      local head = heads[offset]
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
  if place.scanned < position and not place.rooted then
    local head = call('HGET', place.runs, name_at(position))
    if head then
      return position + shared(place.runs, head, position)
    end
  end
  scan(place, position)
  for number = #place.starts, 1, -1 do
    if place.starts[number] <= position then
      return position < place.stops[number] and place.stops[number] or nil
    end
  end
  return nil
end

local function layered_depth(place, places)
  local depth, serves = 0, false
  while depth < total do
    local stop = stop_of(place, depth)
    serves = serves or stop ~= nil
    for _, other in ipairs(places) do
      stop = stop or (other.tier <= place.tier and other.fidelity <= place.fidelity and stop_of(other, depth))
    end
    if not stop then
      break
    end
    depth = stop
  end
  if depth > 0 and not serves and #place.starts == 0 then
    scan(place, depth - 1)
  end
  return (serves or #place.starts > 0 and place.starts[1] < depth) and depth or 0
end

local answer, found = {}, 0

local function add(id, code, depth)
  if depth > 0 then
    answer[found + 1], answer[found + 2], answer[found + 3] = id, code, depth
    found = found + 3
  end
end

local function add_layers(id, prefix, codes, rooted)
  local places = {}
  for number = 1, #codes do
    local layer = byte(codes, number) - 97
    places[number] = {
      code = sub(codes, number, number),
      runs = prefix .. sub(codes, number, number),
      tier = math.floor(layer / 4),
      fidelity = layer % 4,
      rooted = string.find(rooted, sub(codes, number, number), 1, true),
      scanned = 0,
      starts = {},
      stops = {},
    }
  end
  for _, place in ipairs(places) do
    add(id, place.code, layered_depth(place, places))
  end
end

for _, key in ipairs(KEYS) do
  local shard = sub(key, 1, -8) .. 'runs:'
  local records = call('HGETALL', key)
  for at = 1, #records, 2 do
    local id = records[at]
    local codes = match(records[at + 1], '^[^a-l]+([a-l]+)')
    if codes and #codes == 1 then
      add(id, codes, depth_of_one(shard .. id .. ':' .. codes))
    elseif codes then
      add_layers(id, shard .. id .. ':', codes, match(records[at + 1], '[a-l-]+$') or '')
    end
  end
end
return answer
