-- Posts chat bodies for wrk, a fresh user turn in each. SHAPE chooses: small | stream | big | conversation | cold.
local shape = os.getenv("SHAPE")
local path = "/v1/chat/completions"
local words = {"river", "stone", "north", "seven", "paper", "light", "early", "market", "signal", "garden", "copper", "weigh"}
local number = 0

local function text(seed, count)
  local parts = {}
  for i = 1, count do
    seed = (seed * 1103515245 + 12345) % 2147483648
    parts[i] = words[1 + math.floor(seed / 65536) % #words]
  end
  return table.concat(parts, " ")
end

local function message(role, content)
  return string.format('{"role": "%s", "content": "%s"}', role, content)
end

local function body(messages, stream)
  return string.format('{"model": "m", "messages": [%s], "stream": %s}', table.concat(messages, ", "), stream)
end

local system = text(7, shape == "big" and 5600 or 12)
local conversations = {}

-- Sixteen conversations take turns; each grows by an answer and a question, and starts anew after twenty turns.
local function conversation_body()
  local slot = 1 + number % 16
  local turns = conversations[slot]
  if turns == nil or #turns > 41 then
    turns = {message("system", text(number, 300))}
  else
    turns[#turns + 1] = message("assistant", text(number + 1, 60))
  end
  turns[#turns + 1] = message("user", string.format("%08d ", number) .. text(number + 2, 25))
  conversations[slot] = turns
  return body(turns, "false")
end

local function next_body()
  local question = string.format("question %08d please", number)
  if shape == "conversation" then return conversation_body() end
  if shape == "cold" then
    return body({message("system", string.format("%08d ", number) .. text(number, 5600)), message("user", question)}, "false")
  end
  return body({message("system", system), message("user", question)}, shape == "stream" and "true" or "false")
end

function init(args)
  -- Each run has bodies of its own: a run's last turn must not be the next run's first.
  number = tonumber(os.getenv("FIRST")) or 0
end

function request()
  number = number + 1
  return wrk.format("POST", path, {["Content-Type"] = "application/json"}, next_body())
end
