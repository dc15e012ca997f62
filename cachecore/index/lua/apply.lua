-- One step of a holder's writer: all of it or nothing.
--
-- KEYS   1 the shard's `holders`, 2 its `stream`, 3 the holder's namings, then the keys that are numbered below
-- ARGV   1 holder id   2 fence   3 the revision it builds on: a number, `new` (no holdings yet) or `any` (start over)
--        4 revision after it   5 record after it   6 `1` when it must be written even if memory has run out
--        7 kind of the stream's entry, or nothing for no entry   8 sequence   9 events   10 entries the stream keeps
--        11.. four lists, each after its length:
--          keys to be emptied      number of the key
--          pieces                  number of the key, first name, blocks stored now, how many of them are kept,
--                                  header (nothing: as it is), names added, their handles
--          copies                  number of the key, name, further copies
--          namings                 number, description (nothing: delete)
-- Answer `ok`; `fenced` and the fence of a later writer; `lost` and the record when the server has not what the step
--        builds on. A step that has been taken before is `ok`, so it may be repeated when no answer came.
--
-- Memory: the first write is one that the server refuses when memory has run out, and then it refuses nothing more of
-- the step. A step that must go through begins with a write that is never refused.

local call, sub, byte = redis.call, string.sub, string.byte
local NAME, HEADER, CHUNK = 16, 19, 42

local holders, stream, namings_key = KEYS[1], KEYS[2], KEYS[3]
local id, fence, base, revision, kind = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[7]
local cursor = 10

local function take()
  cursor = cursor + 1
  return ARGV[cursor]
end

local record = call('HGET', holders, id)
local stored_fence, stored_revision, places
if record then
  stored_fence, stored_revision, places = string.match(record, '^(%d+) (%-?%d+) %-?%d+ ([%l-]+)')
  if stored_fence and tonumber(stored_fence) > tonumber(fence) then
    return {'fenced', stored_fence}
  end
  if stored_fence == fence and stored_revision == revision and revision ~= '-1' then
    return {'ok'}
  end
end

local lost = {'lost', record or ''}
if base == 'new' then
  if record and (places ~= '-' or stored_revision == '-1' or tonumber(stored_revision) >= tonumber(revision)) then
    return lost
  end
elseif base ~= 'any' and stored_revision ~= base then
  return lost
end

local emptied = {}
for number = 1, take() do
  emptied[number] = KEYS[tonumber(take())]
end
local is_emptied = {}
for _, key in ipairs(emptied) do
  is_emptied[key] = true
end

-- What becomes of each piece: fields to be set and fields to be deleted. `schema.py` says what they hold.
local written, deleted = {}, {}
for _ = 1, take() do
  local key, first, stored, kept = KEYS[tonumber(take())], take(), tonumber(take()), tonumber(take())
  local header, names, handles = take(), take(), take()
  local head = not is_emptied[key] and call('HGET', key, first) or ''
  if (head == '' and 0 or struct.unpack('<I2', head)) ~= stored then
    return lost
  end
  local chunk, lasts = math.floor(kept / CHUNK), ''
  local rest = kept - chunk * CHUNK
  if kept > 0 then
    header = sub(head, 3, 2 + HEADER)
    lasts = sub(head, 3 + HEADER, 2 + HEADER + chunk * NAME)
  end
  local width = byte(header, HEADER) or 0
  if rest > 0 then
    local old = call('HGET', key, first .. string.char(chunk))
    local blocks = math.min(CHUNK, stored - chunk * CHUNK)
    if not old or #old ~= blocks * (NAME + width) then
      return lost
    end
    names = sub(old, 1, rest * NAME) .. names
    handles = sub(old, blocks * NAME + 1, blocks * NAME + rest * width) .. handles
  end
  local fields = {}
  for from = 0, #names / NAME - 1, CHUNK do
    local some = sub(names, from * NAME + 1, (from + CHUNK) * NAME)
    lasts = lasts .. sub(some, -NAME)
    fields[#fields + 1] = first .. string.char(chunk)
    fields[#fields + 1] = some .. sub(handles, from * width + 1, (from + CHUNK) * width)
    chunk = chunk + 1
  end
  local blocks = kept - rest + #names / NAME
  local gone = {}
  for number = chunk, math.ceil(stored / CHUNK) - 1 do
    gone[#gone + 1] = first .. string.char(number)
  end
  if blocks > 0 then
    fields[#fields + 1] = first
    fields[#fields + 1] = struct.pack('<I2', blocks) .. header .. lasts
    written[#written + 1] = {key, fields}
  else
    gone[#gone + 1] = first
  end
  if #gone > 0 then
    deleted[#deleted + 1] = {key, gone}
  end
end

-- From here on nothing is refused but for want of memory, and that only at the first write.
if ARGV[6] == '1' then
  call('HDEL', holders, '')
end
if #emptied > 0 then
  call('UNLINK', unpack(emptied))
end
call('HSET', holders, id, ARGV[5])
for _, piece in ipairs(deleted) do
  call('HDEL', piece[1], unpack(piece[2]))
end
for _, piece in ipairs(written) do
  call('HSET', piece[1], unpack(piece[2]))
end
for _ = 1, take() do
  local key, name, copies = KEYS[tonumber(take())], take(), take()
  if copies == '0' then
    call('HDEL', key, name)
  else
    call('HSET', key, name, copies)
  end
end
for _ = 1, take() do
  local number, description = take(), take()
  if description == '' then
    call('HDEL', namings_key, number)
  else
    call('HSET', namings_key, number, description)
  end
end
if kind ~= '' then
  call('XADD', stream, 'MAXLEN', '~', ARGV[10], '*',
    'h', id, 'f', fence, 'r', revision, 'q', ARGV[8], 'k', kind, 'e', ARGV[9])
end
return {'ok'}
