"""OpenTelemetry spans of the generative AI conventions: collected documents, or an OTLP export.

    {"trace_id": "...", "spans": [{"span_id": "...", "start_time": "...", "end_time": "...", "attributes": {
        "gen_ai.input.messages": "[...]", "gen_ai.output.text": "...", "gen_ai.usage.output_tokens": 20}}]}
    {"resourceSpans": [{"scopeSpans": [{"spans": [
        {"traceId": "...", "startTimeUnixNano": "...", "attributes": [{"key": ..., "value": {...}}]}]}]}]}

Spans without messages are no requests. Within a trace, a request that began after another had ended waits for the one
that ended last, as long as it did when it was recorded; those that overlap wait for the same one.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from loadtest.traces.building import Draft
from loadtest.traces.contract import TraceError
from loadtest.traces.parsing import Format, Parsed, ReadOptions
from loadtest.traces.rows import Row, RowError, Tally, json_rows, understood
from loadtest.traces.texts import TextDrafts, said
from loadtest.traces.times import seconds_of

_MESSAGE_KEYS = ("gen_ai.input.messages", "gen_ai.prompt", "input.value")
_ANSWER_KEYS = ("gen_ai.output.messages", "gen_ai.output.text", "gen_ai.completion", "output.value")
_USAGE_KEYS = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
_SESSION_KEYS = ("session.id", "gen_ai.conversation.id", "exgentic.session.id")


class _Call(NamedTuple):
    start_seconds: float
    end_seconds: float
    place: int
    trace: str
    messages: list[dict[str, Any]]
    answer: str | None
    attributes: Mapping[str, Any]


def _read(path: Path, options: ReadOptions) -> Parsed:
    texts, tally = TextDrafts(options), Tally(path, "otel", noun="span")
    calls: list[_Call] = []

    def add(span: Mapping[str, Any]) -> None:
        attributes = _attributes(span.get("attributes"))
        given = _first(attributes, _MESSAGE_KEYS)
        if given is not None:
            start = seconds_of(span.get("start_time", span.get("startTimeUnixNano")))
            end = seconds_of(span.get("end_time", span.get("endTimeUnixNano", start)))
            trace = str(span.get("trace_id", span.get("traceId", "")))
            answer = _answer(_first(attributes, _ANSWER_KEYS))
            calls.append(_Call(start, end, tally.rows, trace, _messages(given), answer, attributes))

    documents = (row[1] for row in json_rows(path, options.progress))
    found = (span for document in documents for span in spans(document))
    understood((Row(place, span) for place, span in enumerate(found, start=1)), add, tally)
    if not calls:
        raise TraceError(f"{path}: none of its {tally.rows} spans holds messages; read as otel")
    others = tally.rows - tally.malformed_count - len(calls)
    _draft(calls, texts, tally)
    tally.check()
    return texts.parsed(tally, [f"{others} spans are no requests"] if others else [])


def _draft(calls: list[_Call], texts: TextDrafts, tally: Tally) -> None:
    ended: dict[str, list[tuple[float, Draft]]] = {}
    for call in sorted(calls, key=lambda call: call.start_seconds):
        earlier = [one for one in ended.get(call.trace, ()) if one[0] <= call.start_seconds]
        end, follows = max(earlier, key=lambda one: one[0], default=(call.start_seconds, None))
        try:
            draft = _added(call, texts, follows, call.start_seconds - end)
        except ValueError as error:
            tally.skip(call.place, error)
        else:
            ended.setdefault(call.trace, []).append((call.end_seconds, draft))


def _added(call: _Call, texts: TextDrafts, follows: Draft | None, pause_seconds: float) -> Draft:
    # How long the one before takes is a replay's to find out.
    arrival = call.start_seconds if follows is None else follows.arrival_seconds + pause_seconds
    return texts.add(
        {"messages": call.messages},
        arrival_seconds=arrival,
        answer=call.answer,
        output_tokens=_usage(call.attributes),
        session=str(_first(call.attributes, _SESSION_KEYS) or call.trace),
        follows=follows,
        delay_seconds=pause_seconds,
    )


def spans(document: Any) -> Iterator[Any]:
    """Of a document of either form; of another, none."""
    yield from _listed(document, "spans")
    for resource in _listed(document, "resourceSpans"):
        for scope in _listed(resource, "scopeSpans"):
            yield from _listed(scope, "spans")


def _listed(document: Any, key: str) -> list[Any]:
    inner = document.get(key) if isinstance(document, Mapping) else None
    return inner if isinstance(inner, list) else []


def _attributes(given: Any) -> Mapping[str, Any]:
    if isinstance(given, Mapping):
        return given
    return {one["key"]: next(iter(one["value"].values()), None) for one in given or ()}


def _first(attributes: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((attributes[key] for key in keys if attributes.get(key)), None)


def _messages(given: Any) -> list[dict[str, Any]]:
    messages = _loaded(given)
    if isinstance(messages, Mapping):
        messages = messages.get("messages")
    if not isinstance(messages, list):
        return [{"role": "user", "content": str(given)}]
    return [_message(one) for one in messages]


def _message(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise RowError("a message without a role")
    if "content" in given or "parts" not in given:
        return {"content": "", **given}
    texts = [part.get("content") for part in given["parts"] if isinstance(part, Mapping)]
    return {"role": given["role"], "content": "\n".join(text for text in texts if isinstance(text, str))}


def _answer(given: Any) -> str | None:
    loaded = _loaded(given)
    if isinstance(loaded, list) and loaded:
        return said(_message(loaded[-1]))
    return given if isinstance(given, str) else None


def _loaded(given: Any) -> Any:
    if not isinstance(given, str) or given[:1] not in ("[", "{"):
        return given
    try:
        return orjson.loads(given)
    except orjson.JSONDecodeError:
        return given


def _usage(attributes: Mapping[str, Any]) -> int | None:
    value = _first(attributes, _USAGE_KEYS)
    return int(value) if isinstance(value, int | float | str) and str(value).isdigit() else None


OTEL = Format(
    "otel",
    "OpenTelemetry spans with gen_ai messages: collected or OTLP JSON",
    lambda sample: isinstance(sample.keys.get("spans"), list) or "resourceSpans" in sample.keys,
    _read,
)
