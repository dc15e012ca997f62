"""Where prompts that should begin alike part, and which field of the body did it.

Only what comes before the first difference is reused, so a clock in the first line of a system prompt costs all of it.
Bodies are read as templates render them: tools, then messages from the first to the last, each one's content and calls.
Of two requests of one conversation the later should begin with the whole of the earlier; of two requests of one
application, with its tools and system prompt.
"""

import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from loadtest.traces.contract import NO_PREDECESSOR, Trace, TraceRequest

_CLOCK = re.compile(
    r"\d{4}-\d{2}-\d{2}(?:[T ]\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?)?(?:Z|[+-]\d{2}:?\d{2})?"
    r"|\d{1,2}:\d{2}(?::\d{2})?(?:\s?[AaPp][Mm])?"
    r"|\d{1,2}/\d{1,2}/\d{2,4}"
    r"|(?:(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day,?\s*)?"
    r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.? \d{1,2}(?:, \d{4})?"
    r"|\b1[5-9]\d{8}(?:\d{3})?\b"
)
_DIGITS = re.compile(r"[0-9a-fA-F]*\d[0-9a-fA-F]*")
_KINDS = (
    ("a clock", _CLOCK),
    (
        "a unique id",
        re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}|\b(?=\w*\d)[0-9a-zA-Z_-]{12,}\b"),
    ),
    ("a number", re.compile(r"\b\d+(?:\.\d+)?\b")),
)
_NEAR = 48
"""Characters on each side of a difference in which its kind is looked for."""
_SHOWN = 24
LOST_TOKENS_MIN = 32
PAIRS_MAX = 4_000
"""That are compared: of more, as many evenly."""
_OPENING = 160
"""Characters of the first message, digits aside, by which requests of one application are known."""


_Pair = tuple[TraceRequest, TraceRequest, bool]
"""An earlier request, a later one, and whether all of the earlier should begin the later."""


class Leaf(NamedTuple):
    """A piece of text of a body, and where it stands."""

    path: str
    text: str
    is_opening: bool
    """Before the first word of a user: what all requests of an application have in common."""


class Difference(NamedTuple):
    path: str
    kind: str
    kept_characters: int
    """Before it."""
    lost_characters: int
    """From it on, that both prompts have at most."""
    before: str
    after: str
    is_opening: bool


@dataclass(frozen=True, slots=True)
class Divergence:
    """All differences of one kind in one field."""

    path: str
    kind: str
    pairs: int
    kept_tokens_median: int
    lost_tokens_median: int
    example: tuple[str, str]


def divergences(trace: Trace, turns: Sequence[tuple[TraceRequest, TraceRequest]]) -> list[Divergence]:
    """Of conversations' turns, and of neighbours of one application; most tokens lost first. Needs bodies, and tells
    nothing of differences that cost next to nothing."""
    found: dict[tuple[str, str], list[tuple[Difference, float]]] = {}
    for before, after, whole in _evenly([*((*turn, True) for turn in turns), *_neighbours(trace)]):
        if before.body is None or after.body is None:
            continue
        difference = compare(list(leaves(before.body)), later := list(leaves(after.body)))
        if difference is not None and (whole or difference.is_opening):
            scale = after.input_tokens / max(sum(len(leaf.text) for leaf in later), 1)
            found.setdefault((difference.path, difference.kind), []).append((difference, scale))
    merged = [_merged(path, kind, differences) for (path, kind), differences in found.items()]
    costly = [one for one in merged if one.lost_tokens_median >= LOST_TOKENS_MIN]
    return sorted(costly, key=lambda one: -one.pairs * one.lost_tokens_median)


def _evenly(pairs: Sequence[_Pair]) -> Sequence[_Pair]:
    return pairs[:: -(-len(pairs) // PAIRS_MAX) or 1]


def _merged(path: str, kind: str, differences: Sequence[tuple[Difference, float]]) -> Divergence:
    first, _ = differences[0]
    return Divergence(
        path,
        kind,
        len(differences),
        round(median(one.kept_characters * scale for one, scale in differences)),
        round(median(one.lost_characters * scale for one, scale in differences)),
        (first.before, first.after),
    )


def _neighbours(trace: Trace) -> Iterator[_Pair]:
    """Each request that begins a conversation, with the one of its application before it."""
    last: dict[Hashable, TraceRequest] = {}
    sessions: set[str] = set()
    for request in trace.requests:
        if request.body is None or request.follows != NO_PREDECESSOR or request.session in sessions:
            continue
        if request.session:
            sessions.add(request.session)
        found = application(request.body)
        if found is not None:
            key = (request.tenant, found)
            if key in last:
                yield last[key], request, False
            last[key] = request


def application(body: Mapping[str, Any]) -> Hashable:
    """What tells applications apart, whatever the time is: how the system prompt begins, and which tools there are.
    None for a body that has neither."""
    first = next((leaf.text for leaf in leaves(body) if leaf.is_opening and leaf.path != "tools"), "")
    opening = _DIGITS.sub("#", _CLOCK.sub("#", first[: 2 * _OPENING]))[:_OPENING]
    tools = tuple(sorted(_tool_name(tool) for tool in _sequence(body.get("tools"))))
    return (opening, tools) if opening or tools else None


def _tool_name(tool: Any) -> str:
    described = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return str(described.get("name", "")) if isinstance(described, Mapping) else ""


def leaves(body: Mapping[str, Any]) -> Iterator[Leaf]:
    """A body's text in the order in which templates render it. What is no chat and no completion has none."""
    for tool in _sequence(body.get("tools")):
        yield Leaf("tools", _plain(tool), True)
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        yield Leaf("prompt", prompt, False)
    opening = True
    for number, message in enumerate(_sequence(body.get("messages"))):
        if not isinstance(message, Mapping):
            continue
        role = str(message.get("role", ""))
        opening = opening and role in ("system", "developer")
        yield from _of_message(message, f"messages[{number if opening else 'n'}] ({role})", opening)


def _of_message(message: Mapping[str, Any], path: str, opening: bool) -> Iterator[Leaf]:
    content = message.get("content")
    if isinstance(content, str):
        yield Leaf(f"{path}.content", content, opening)
    for part in _sequence(content):
        yield Leaf(f"{path}.content", _plain(part), opening)
    for name in ("reasoning_content", "tool_calls", "tool_call_id"):
        if message.get(name):
            yield Leaf(f"{path}.{name}", _plain(message[name]), opening)


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def compare(before: Sequence[Leaf], after: Sequence[Leaf]) -> Difference | None:
    """The first difference; None where the later text begins with the whole of the earlier."""
    kept = 0
    for earlier, later in zip(before, after, strict=False):
        if earlier.path == later.path and earlier.text == later.text:
            kept += len(earlier.text)
            continue
        if earlier.path != later.path:
            return _difference(
                earlier._replace(path=f"{earlier.path}, then {later.path}"), later, 0, kept, before, after
            )
        place = common_characters(earlier.text, later.text)
        return _difference(earlier, later, place, kept, before, after)
    missing = before[len(after) :]
    return _difference(missing[0], Leaf("", "", False), 0, kept, before, after) if missing else None


def _difference(
    earlier: Leaf, later: Leaf, place: int, kept: int, before: Sequence[Leaf], after: Sequence[Leaf]
) -> Difference:
    kept += place
    length = min(sum(len(leaf.text) for leaf in leaves_) for leaves_ in (before, after))
    return Difference(
        earlier.path,
        _kind(earlier, later, place),
        kept,
        max(length - kept, 0),
        _shown(earlier.text, place),
        _shown(later.text, place),
        earlier.is_opening,
    )


def _kind(earlier: Leaf, later: Leaf, place: int) -> str:
    for kind, pattern in _KINDS:
        if _at(pattern, earlier.text, place) and _at(pattern, later.text, place):
            return kind
    if earlier.path.startswith("tools"):
        return "tools that change or change places"
    if not later.text:
        return "history that was cut"
    if earlier.path.startswith("messages[n]"):
        return "history that was rewritten"
    return "text that changes"


def _at(pattern: re.Pattern[str], text: str, place: int) -> bool:
    """Whether a match covers the place."""
    start = max(place - _NEAR, 0)
    near = text[start : place + _NEAR]
    return any(match.start() <= place - start <= match.end() for match in pattern.finditer(near))


def _shown(text: str, place: int) -> str:
    return " ".join(text[max(place - _SHOWN // 2, 0) : place + _SHOWN].split())


def common_characters(left: str, right: str) -> int:
    """Length of the longest beginning that two texts have in common."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left.startswith(right[:middle]) else (low, middle - 1)
    return low
