"""Files of OpenAI requests: batch files, and logs that keep bodies.

    {"custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"timestamp": "2026-01-01T00:00:00Z", "request": {"messages": [...]}, "response": {"usage": {...}}}
    {"messages": [...], "max_tokens": 100}

A log's body is under one of BODY_KEYS or the row itself; its time under one of TIME_KEYS, in any usual form. What was
answered, or how many tokens that had, is taken from the log where it is there.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from loadtest.traces.parsing import Format, Parsed, ReadOptions, Sample
from loadtest.traces.rows import RowError, Tally, json_rows, understood
from loadtest.traces.texts import TextDrafts, said
from loadtest.traces.times import seconds_of

BODY_KEYS = ("body", "request_body", "request", "payload", "input")
TIME_KEYS = (
    "timestamp",
    "ts",
    "time",
    "@timestamp",
    "start_time",
    "startTime",
    "received_at",
    "created_at",
    "created",
    "arrival_time",
)
SESSION_KEYS = ("session_id", "conversation_id", "session", "user_id", "user")
TENANT_KEYS = ("tenant", "organization", "team", "api_key_name")
_ANSWER_KEYS = ("response", "response_body", "output", "completion", "answer")
_OUTPUT_KEYS = ("output_length", "output_tokens", "completion_tokens", "output_tokens_count")


def is_body(value: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping) and (
        (isinstance(value.get("messages"), list) and bool(value["messages"]))
        or isinstance(value.get("prompt"), str | list)
        or ("model" in value and isinstance(value.get("input"), str | list))
    )


def body_in(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises RowError."""
    for candidate in (*(row.get(key) for key in BODY_KEYS), row):
        if is_body(candidate):
            return chat_form(candidate)
    url = row.get("url")
    raise RowError(f"no `messages` and no `prompt`{f'; it is for {url}' if url else ''}")


def chat_form(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A body of the responses API as one of chat completions; others as they are."""
    if "input" not in body or "messages" in body or "prompt" in body:
        return body
    given = body["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = [{"role": item["role"], "content": item.get("content", "")} for item in items if "role" in item]
    if isinstance(body.get("instructions"), str):
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    if not messages:
        raise RowError("an `input` without messages")
    kept = {key: value for key, value in body.items() if key not in ("input", "instructions", "max_output_tokens")}
    limit = {"max_completion_tokens": body["max_output_tokens"]} if "max_output_tokens" in body else {}
    return {**kept, **limit, "messages": messages}


def one_by_one(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A body for each of its prompts."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not all(type(part) is int for part in prompt):
        for part in prompt:
            yield {**body, "prompt": part}
    else:
        yield body


def text_under(row: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    value = next((row[key] for key in keys if isinstance(row.get(key), str | int)), "")
    return str(value)


def answered(row: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """What was answered: its text, or how many tokens it had."""
    response = next((row[key] for key in _ANSWER_KEYS if isinstance(row.get(key), str | Mapping)), None)
    if isinstance(response, Mapping) and isinstance(response.get("body"), Mapping):
        response = response["body"]
    for source in (response, row):
        usage = source.get("usage") if isinstance(source, Mapping) else None
        count = _count(usage, ("completion_tokens", "output_tokens")) if isinstance(usage, Mapping) else None
        if count is not None:
            return None, count
    count = _count(row, _OUTPUT_KEYS)
    if count is not None:
        return None, count
    if isinstance(response, Mapping):
        choices = response.get("choices")
        message = choices[0].get("message") if isinstance(choices, list) and choices else None
        return (said(message) if isinstance(message, Mapping) else None), None
    return response, None


def _count(source: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((source[key] for key in keys if type(source.get(key)) is int and source[key] >= 0), None)


def _read_log(path: Path, options: ReadOptions) -> Parsed:
    texts, tally = TextDrafts(options), Tally(path, "request-log", noun="row")

    def add(row: Mapping[str, Any]) -> None:
        body = body_in(row)
        stamp = next((row[key] for key in TIME_KEYS if row.get(key) is not None and row.get(key) != body), None)
        answer, count = answered(row)
        for one in one_by_one(body):
            texts.add(
                one,
                arrival_seconds=None if stamp is None else seconds_of(stamp),
                answer=answer,
                output_tokens=count,
                session=text_under(row, SESSION_KEYS) or text_under(one, ("user",)),
                tenant=text_under(row, TENANT_KEYS),
            )

    understood(json_rows(path, options.progress), add, tally)
    return texts.parsed(tally)


def _read_batch(path: Path, options: ReadOptions) -> Parsed:
    texts, tally = TextDrafts(options), Tally(path, "openai-batch")

    def add(row: Mapping[str, Any]) -> None:
        for one in one_by_one(body_in(row)):
            # A batch is there at once.
            texts.add(one, arrival_seconds=0.0)

    understood(json_rows(path, options.progress), add, tally)
    return texts.parsed(tally, ["a batch: all requests arrive at once"])


def _is_batch(sample: Sample) -> bool:
    return sample.has("custom_id", "body") and ("url" in sample.keys or "method" in sample.keys)


def _is_log(sample: Sample) -> bool:
    return any(is_body(candidate) for candidate in (*(sample.keys.get(key) for key in BODY_KEYS), sample.keys))


OPENAI_BATCH = Format(
    "openai-batch",
    "OpenAI batch files (production-stack, AIBrix jobs): custom_id, url, body; all at once",
    _is_batch,
    _read_batch,
)
REQUEST_LOG = Format(
    "request-log",
    "logs of OpenAI bodies: one a row, by itself or beside a time, an answer and a session",
    _is_log,
    _read_log,
)
