"""AIPerf's files: payloads, traces with sessions that carry deltas, custom inputs, and exports of what a run sent.

    inputs   {"data": [{"session_id": "s", "payloads": [{"messages": [...]}, ...]}]}
    trace    {"session_id": "s", "timestamp": 0, "input_length": 1000, "output_length": 200, "hash_ids": [0, 1]}
             {"session_id": "s", "delay": 15371.7, "input_length": 600, "output_length": 90, "hash_ids": [7, 8]}
    texts    {"timestamp": 1000, "text_input": "Hello world", "output_length": 4}, or `messages` in its place
             {"text": "...", "timestamp": 0} {"texts": ["..."]}
             {"session_id": "s", "turns": [{"text": "...", "delay": 1000}]}
    export   {"metadata": {"request_start_ns": ..., "conversation_id": ...}, "metrics": {"input_sequence_length": ...}}

Times are milliseconds. A session's later rows hold only what is new: the prompt is all of the session before, answers
included, and then the row's own tokens; so its blocks do not fall on those of the file, and are named by their ends.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

from loadtest.traces.arrivals import poisson
from loadtest.traces.blocksizes import settle_block_size
from loadtest.traces.bodies import chat_form
from loadtest.traces.building import Draft
from loadtest.traces.lengths import finish_lengths
from loadtest.traces.parsing import Format, Parsed, ReadOptions, Sample
from loadtest.traces.pieces import Beginning, Piece, PromptTree
from loadtest.traces.rows import NUMBER_MAX, RowError, Tally, json_rows, number, numbers, tokens, understood
from loadtest.traces.sharegpt import with_stand_ins
from loadtest.traces.texts import TextDrafts

BLOCK_SIZE_TOKENS = 512
_MILLISECONDS, _NANOSECONDS = 1e-3, 1e-9


def _read_inputs(path: Path, options: ReadOptions) -> Parsed:
    texts, tally = TextDrafts(options), Tally(path, "aiperf-inputs", noun="session")

    def add(session: Mapping[str, Any]) -> None:
        previous: Draft | None = None
        with texts.together():
            for payload in session["payloads"]:
                previous = texts.add(chat_form(payload), session=str(session["session_id"]), follows=previous)

    rows = (row for outer in json_rows(path, options.progress) for row in _sessions(outer[1]))
    understood(rows, add, tally)
    return texts.parsed(tally)


def _sessions(document: Any) -> Iterator[tuple[int, Any]]:
    data = document.get("data") if isinstance(document, Mapping) else None
    yield from enumerate(data if isinstance(data, list) else [document], start=1)


class _Deltas:
    """Sessions whose rows hold what is new in them."""

    def __init__(self, block_size_tokens: int, options: ReadOptions) -> None:
        self._size = block_size_tokens
        self._output_tokens = options.output_tokens
        self._starts = poisson(Random(options.seed), options.rate)
        self.untimed = 0
        self._root = PromptTree(block_size_tokens).root
        self._last: dict[str, tuple[Draft, Beginning]] = {}
        self.drafts: list[Draft] = []

    def add(self, row: Mapping[str, Any]) -> None:
        session = str(row.get("session_id", ""))
        previous, start = self._last.get(session, (None, self._root)) if session else (None, self._root)
        length = tokens(row, "input_length", 1)
        output = tokens(row, "output_length") if row.get("output_length") is not None else self._output_tokens
        pause = number(row, "delay", 0.0) * _MILLISECONDS if row.get("delay") is not None else 0.0
        prompt = self._grown(start, numbers(row, "hash_ids"), length)
        arrival = number(row, "timestamp") * _MILLISECONDS if row.get("timestamp") is not None else None
        if arrival is None:
            arrival = previous.arrival_seconds + pause if previous is not None else self._start()
        tenant = f"group-{row['group_id']}" if "group_id" in row else ""
        draft = Draft(
            arrival, prompt.tokens, output, prompt.chain, session, tenant, previous, pause if previous else 0.0
        )
        self.drafts.append(draft)
        if session:
            answer = Piece(("answer", session, len(self.drafts)), output, "assistant")
            self._last[session] = draft, prompt.alone(answer)

    def _start(self) -> float:
        self.untimed += 1
        return next(self._starts)

    def _grown(self, start: Beginning, ids: list[int], length: int) -> Beginning:
        """By the row's blocks; the last may be partly filled, and where ids are too few, the rest is the row's own."""
        prompt, left = start, length
        for number_of_block in ids:
            prompt = prompt.then(Piece(number_of_block, min(self._size, left)))
            left -= min(self._size, left)
        return prompt.alone(Piece("rest", left))


def _read_trace(path: Path, options: ReadOptions) -> Parsed:
    tally = Tally(path, "aiperf")
    rows: list[Mapping[str, Any]] = []
    understood(json_rows(path, options.progress), lambda row: rows.append(_checked(row)), tally)
    lengths = [(row["input_length"], len(row["hash_ids"])) for row in rows]
    block_size, notes = settle_block_size(lengths, BLOCK_SIZE_TOKENS, options.block_size_tokens)
    deltas = _Deltas(block_size, options)
    for row in rows:
        deltas.add(row)
    sessions = len({draft.session for draft in deltas.drafts if draft.session})
    if sessions:
        notes.append(
            f"{sessions} sessions whose rows hold what is new: prompts are the session so far, answers included"
        )
    if deltas.untimed:
        rate = f"{options.rate:g} a second (Poisson, seed {options.seed})"
        notes.append(f"no times: {deltas.untimed} requests or sessions begin at {rate}")
    return Parsed(deltas.drafts, block_size, [*notes, *tally.notes()])


def _checked(row: Mapping[str, Any]) -> Mapping[str, Any]:
    numbers(row, "hash_ids")
    tokens(row, "input_length", 1)
    if row.get("output_length") is not None:
        tokens(row, "output_length")
    for key, least in (("timestamp", -NUMBER_MAX), ("delay", 0.0)):
        if row.get(key) is not None:
            number(row, key, least)
    return row


def _read_texts(path: Path, options: ReadOptions) -> Parsed:
    texts, tally = TextDrafts(options), Tally(path, "aiperf-texts")
    last: dict[str, Draft] = {}

    def add(row: Mapping[str, Any]) -> None:
        session = str(row.get("session_id") or "")
        if "turns" in row:
            _add_turns(row["turns"], session or f"row-{tally.rows}", texts, options)
            return
        previous = last.get(session) if session else None
        arrival = number(row, "timestamp") * _MILLISECONDS if row.get("timestamp") is not None else None
        draft = texts.add(
            _body(row),
            arrival_seconds=arrival,
            output_tokens=tokens(row, "output_length") if row.get("output_length") is not None else None,
            session=session,
            follows=previous,
            delay_seconds=number(row, "delay", 0.0) * _MILLISECONDS if row.get("delay") is not None else None,
        )
        if session:
            last[session] = draft

    understood(json_rows(path, options.progress), add, tally)
    return texts.parsed(tally)


def _body(row: Mapping[str, Any]) -> Mapping[str, Any]:
    if "messages" in row:
        return {key: row[key] for key in ("messages", "tools") if row.get(key)}
    text = row.get("text", row.get("text_input"))
    if text is None and isinstance(row.get("texts"), list):
        text = "\n".join(_text_of(part) for part in row["texts"])
    if not isinstance(text, str):
        raise RowError("neither text nor messages")
    return {"messages": [{"role": "user", "content": text}]}


def _text_of(part: Any) -> str:
    contents = part.get("contents") if isinstance(part, Mapping) else None
    return "\n".join(map(str, contents)) if isinstance(contents, list) else str(part)


def _add_turns(turns: Any, session: str, texts: TextDrafts, options: ReadOptions) -> None:
    questions = [[_body(turn if isinstance(turn, Mapping) else {"text": turn})["messages"][0]] for turn in turns]
    previous: Draft | None = None
    with texts.together():
        for place, turn in enumerate(turns):
            messages = with_stand_ins(questions[: place + 1], session, options.output_tokens)
            stated = isinstance(turn, Mapping) and turn.get("delay") is not None
            pause = number(turn, "delay", 0.0) * _MILLISECONDS if stated else None
            previous = texts.add({"messages": messages}, session=session, follows=previous, delay_seconds=pause)


def _read_export(path: Path, options: ReadOptions) -> Parsed:
    tally, drafts = Tally(path, "aiperf-export"), list[Draft]()

    def add(row: Mapping[str, Any]) -> None:
        metadata, metrics = row["metadata"], row["metrics"]
        start = number(metadata, "request_start_ns") * _NANOSECONDS
        prompt, answer = (tokens(metrics[f"{side}_sequence_length"], "value") for side in ("input", "output"))
        drafts.append(Draft(start, max(prompt, 1), answer, session=str(metadata.get("conversation_id") or "")))

    understood(json_rows(path, options.progress), add, tally)
    return finish_lengths(drafts, options, tally)


def _is_inputs(sample: Sample) -> bool:
    data = sample.keys.get("data")
    return isinstance(data, list) and bool(data) and isinstance(data[0], Mapping) and "payloads" in data[0]


def _is_texts(sample: Sample) -> bool:
    keys = sample.keys
    holds_text = isinstance(keys.get("text_input", keys.get("text")), str) or isinstance(keys.get("texts"), list)
    holds_messages = "messages" in keys and "session_id" in keys and ("delay" in keys or "output_length" in keys)
    holds_turns = "session_id" in keys and isinstance(keys.get("turns"), list)
    return holds_text or holds_messages or holds_turns


AIPERF_INPUTS = Format("aiperf-inputs", "AIPerf inputs.json: payloads by session", _is_inputs, _read_inputs)
AIPERF = Format(
    "aiperf",
    "AIPerf traces: Mooncake's keys with session_id and delay in ms; later rows hold what is new",
    lambda sample: sample.has("input_length", "hash_ids"),
    _read_trace,
)
AIPERF_TEXTS = Format(
    "aiperf-texts",
    "AIPerf custom inputs: text, texts, turns or messages, with timestamp and delay in ms",
    _is_texts,
    _read_texts,
)
AIPERF_EXPORT = Format(
    "aiperf-export",
    "AIPerf profile_export.jsonl: when each request was sent and how long it was",
    lambda sample: sample.has("metadata", "metrics") and "request_start_ns" in sample.keys["metadata"],
    _read_export,
)
