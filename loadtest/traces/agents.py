"""What agents left behind: SWE-agent's trajectories, tau-bench's conversations, BFCL's questions.

    .traj      {"history": [{"role": "system", "content": "..."}, ...], "trajectory": [{"execution_time": 0.4, ...}]}
    tau-bench  {"task_id": 0, "traj": [{"role": "system", ...}, ...]}
               {"messages_display": "user: ...\\nassistant: ..."}
    BFCL       {"id": "multi_turn_base_0", "question": [[{"role": "user", ...}], ...], "function": [{...}]}

Each message of the assistant is the answer to a request of all before it, so a conversation is one growing prefix.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.traces.parsing import Format, Parsed, ReadOptions
from loadtest.traces.rows import Row, RowError, Tally, json_rows, understood
from loadtest.traces.sharegpt import with_stand_ins
from loadtest.traces.texts import TextDrafts

_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
_DISPLAYED = re.compile(r"^(system|user|assistant|tool): ", re.MULTILINE)
_TOOL_DOCUMENTS = "multi_turn_func_doc"
_TOOL_FILES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MemoryAPI_kv": "memory_kv",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
}
"""BFCL names classes where their tools are described in files beside the questions."""


def plain_messages(history: Any) -> list[dict[str, Any]]:
    """Messages with the keys of the API alone. Raises RowError."""
    if not isinstance(history, list) or not history:
        raise RowError("no list of messages")
    messages: list[dict[str, Any]] = []
    for message in history:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError("a message without a role")
        kept = {key: message[key] for key in _MESSAGE_KEYS if message.get(key) is not None}
        ids = message.get("tool_call_ids")
        if "tool_call_id" not in kept and isinstance(ids, list) and ids:
            kept["tool_call_id"] = ids[0]
        messages.append({"content": "", **kept})
    return messages


def _read_trajectory(path: Path, options: ReadOptions) -> Parsed:
    texts, tally = TextDrafts(options), Tally(path, "swe-agent", noun="document")

    def add(row: Mapping[str, Any]) -> None:
        texts.converse(plain_messages(row["history"]), session=path.stem)
        steps = [step for step in row.get("trajectory") or () if isinstance(step, dict)]
        # A request follows the execution of the step before it.
        for draft, step in zip(texts.drafts[1:], steps, strict=False):
            seconds = step.get("execution_time")
            if isinstance(seconds, int | float) and seconds >= 0.0 and draft.follows is not None:
                draft.delay_seconds = float(seconds)
                draft.arrival_seconds = draft.follows.arrival_seconds + draft.delay_seconds

    understood(json_rows(path, options.progress), add, tally)
    return texts.parsed(tally)


def _read_tau(path: Path, options: ReadOptions) -> Parsed:
    texts, tally = TextDrafts(options), Tally(path, "tau-bench")

    def add(row: Mapping[str, Any]) -> None:
        messages = displayed(row["messages_display"]) if "messages_display" in row else plain_messages(row["traj"])
        key = f"task-{row['task_id']}-{row.get('trial', 0)}" if "task_id" in row else f"row-{tally.rows}"
        texts.converse(messages, session=key)

    understood(json_rows(path, options.progress), add, tally)
    return texts.parsed(tally)


def displayed(text: str) -> list[dict[str, Any]]:
    """The messages of a conversation that was written out, each line that begins with a role beginning one."""
    parts = _DISPLAYED.split(text)
    if len(parts) < 3:
        raise RowError("no line begins with a role")
    return [
        {"role": role, "content": content.removesuffix("\n")}
        for role, content in zip(parts[1::2], parts[2::2], strict=True)
    ]


def _read_bfcl(path: Path, options: ReadOptions) -> Parsed:
    texts, tally = TextDrafts(options), Tally(path, "bfcl")
    described: dict[str, list[dict[str, Any]]] = {}
    missing: set[str] = set()

    def add(row: Mapping[str, Any]) -> None:
        turns = [plain_messages(turn) for turn in row["question"] if turn]
        messages = with_stand_ins(turns, row["id"], options.output_tokens)
        tools = list(row.get("function") or ())
        excluded = set(row.get("excluded_function") or ())
        for name in map(str, row.get("involved_classes") or ()):
            if name not in described:
                described[name] = _described(path, name)
                missing.update([name] if not described[name] else [])
            tools += [tool for tool in described[name] if tool["name"] not in excluded]
        rest = {"tools": [_tool(tool) for tool in tools]} if tools else {}
        texts.converse(messages, session=str(row["id"]), rest=rest)

    understood(json_rows(path, options.progress), add, tally)
    notes = ["answers between turns are stand-ins of the assumed length"]
    if missing:
        notes.append(f"the tools of {', '.join(sorted(missing))} are described in no file beside this one: left out")
    return texts.parsed(tally, notes)


def _described(path: Path, name: str) -> list[dict[str, Any]]:
    file = path.parent / _TOOL_DOCUMENTS / f"{_TOOL_FILES.get(name, name)}.json"
    if not file.is_file():
        return []
    return [row.value for row in json_rows(file) if isinstance(row, Row) and isinstance(row.value, dict)]


def _tool(described: Mapping[str, Any]) -> dict[str, Any]:
    function = {key: described[key] for key in ("name", "description", "parameters") if key in described}
    return {"type": "function", "function": function}


def _is_conversation(messages: Any) -> bool:
    return isinstance(messages, Sequence) and bool(messages) and isinstance(messages[0], dict) and "role" in messages[0]


SWE_AGENT = Format(
    "swe-agent",
    "SWE-agent: a trajectory's history, a request for each action",
    lambda sample: sample.has("history", "trajectory") or _is_conversation(sample.keys.get("history")),
    _read_trajectory,
)
TAU_BENCH = Format(
    "tau-bench",
    "tau-bench: trajectories of tool-calling agents, as messages",
    lambda sample: _is_conversation(sample.keys.get("traj")) or sample.has("messages_display"),
    _read_tau,
)
BFCL = Format(
    "bfcl",
    "BFCL: questions with tool schemas, without answers",
    lambda sample: sample.has("id", "question") and isinstance(sample.keys["question"], list),
    _read_bfcl,
)
