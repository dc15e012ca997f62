"""Which field of a body parts two prompts that should begin alike."""

from typing import Any

import pytest

from cachecore.blocks import EMPTY_CHAIN
from loadtest.audit.divergence import application, common_characters, compare, divergences, leaves
from loadtest.audit.traffic import turns_of
from loadtest.traces.contract import NO_PREDECESSOR, Trace, TraceRequest

RULES = "Answer briefly and cite the handbook wherever you can. " * 20


def chat(*messages: tuple[str, str], **keys: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages], **keys}


def request(body: dict[str, Any] | None, session: str = "", follows: int = NO_PREDECESSOR) -> TraceRequest:
    characters = sum(len(leaf.text) for leaf in leaves(body or {}))
    return TraceRequest(0.0, EMPTY_CHAIN, characters // 4, 10, session, "", follows, 0.0, body)


def trace(*requests: TraceRequest) -> Trace:
    return Trace("t", "made", 16, requests)


def found_in(*requests: TraceRequest) -> list[tuple[str, str, int]]:
    made = trace(*requests)
    return [(one.path, one.kind, one.pairs) for one in divergences(made, turns_of(made))]


def clocked(minute: int, *more: tuple[str, str]) -> dict[str, Any]:
    return chat(("system", f"You help. It is 2026-11-30 10:{minute:02}. {RULES}"), *more)


def test_a_clock_in_the_system_prompt_is_named() -> None:
    first, second = clocked(41, ("user", "hi")), clocked(42, ("user", "hi"), ("assistant", "yes?"), ("user", "well"))
    made = trace(request(first, "s"), request(second, "s"))
    (one,) = divergences(made, turns_of(made))
    assert (one.path, one.kind, one.pairs) == ("messages[0] (system).content", "a clock", 1)
    assert one.kept_tokens_median == pytest.approx(len("You help. It is 2026-11-30 10:4") / 4, abs=1)
    assert one.lost_tokens_median == pytest.approx(len(RULES) / 4, rel=0.05)
    assert one.example == ("6-11-30 10:41. Answer briefly and ci", "6-11-30 10:42. Answer briefly and ci")


def test_a_clock_is_found_between_conversations_as_well() -> None:
    requests = [request(clocked(minute, ("user", f"question {minute}"))) for minute in range(10)]
    assert found_in(*requests) == [("messages[0] (system).content", "a clock", 9)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("at 9:05 AM", "at 9:06 AM"),
        ("2026-11-30T10:45:01.123Z", "2026-11-30T10:45:01.124Z"),
        ("2026-11-30", "2026-12-01"),
        ("Monday, November 30, 2026", "Tuesday, December 1, 2026"),
        ("11/30/2026", "12/01/2026"),
        ("1795000000", "1795000007"),
    ],
)
def test_clocks_of_many_forms(before: str, after: str) -> None:
    assert found_in(*(request(chat(("system", f"Now: {now}. {RULES}"))) for now in (before, after)))[0][1] == "a clock"


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("b3c1d2e4-0000-4a5b-8c6d-000000000001", "b3c1d2e4-0000-4a5b-8c6d-00000000000f", "a unique id"),
        ("req_9f8e7d6c5b4a", "req_1a2b3c4d5e6f", "a unique id"),
        ("attempt 7", "attempt 8", "a number"),
        ("customer Ada", "customer Bob", "text that changes"),
    ],
)
def test_other_things_that_change(before: str, after: str, kind: str) -> None:
    bodies = [chat(("system", f"You are a helper of long standing, {text}. {RULES}")) for text in (before, after)]
    (one,) = divergences(trace(*map(request, bodies, "ss")), [(request(bodies[0]), request(bodies[1]))])
    assert one.kind == kind


def test_turns_that_append_do_not_part() -> None:
    first = chat(("system", RULES), ("user", "a"))
    second = chat(("system", RULES), ("user", "a"), ("assistant", "b"), ("user", "c"))
    assert found_in(request(first, "s"), request(second, "s")) == []


def test_other_questions_of_one_application_do_not_count() -> None:
    bodies = [chat(("system", RULES), ("user", f"{word} {RULES}")) for word in ("why", "how", "when")]
    assert found_in(*map(request, bodies)) == []


def test_a_history_that_is_rewritten_is_named() -> None:
    first = chat(("system", RULES), ("user", "a"), ("assistant", "thinking ... " + RULES), ("user", "b"))
    second = chat(("system", RULES), ("user", "a"), ("assistant", RULES), ("user", "b"), ("user", "c"))
    assert found_in(request(first, "s"), request(second, "s")) == [
        ("messages[n] (assistant).content", "history that was rewritten", 1)
    ]


def test_a_history_that_is_cut_is_named() -> None:
    first = chat(("system", RULES), ("user", RULES), ("assistant", RULES))
    second = chat(("system", RULES), ("user", RULES))
    difference = compare(list(leaves(first)), list(leaves(second)))
    assert difference is not None
    assert difference.kind == "history that was cut"
    assert difference.kept_characters == 2 * len(RULES)


def test_tools_that_change_places_are_named() -> None:
    tools = [{"type": "function", "function": {"name": name, "description": RULES}} for name in ("look", "book")]
    bodies = [chat(("user", "a"), tools=order) for order in (tools, tools[::-1])]
    assert application(bodies[0]) == application(bodies[1])
    assert found_in(*map(request, bodies)) == [("tools", "tools that change or change places", 1)]


def test_applications_differ_by_system_prompt_and_tools_but_not_by_digits() -> None:
    assert application(clocked(1)) == application(clocked(59))
    assert application(chat(("system", "You write."))) != application(chat(("system", "You read.")))
    assert application(chat(("user", "hi"))) is None
    assert application({"prompt": "hi"}) is None


def test_content_in_parts_and_calls_are_read_in_order() -> None:
    body = {
        "tools": [{"function": {"name": "f"}}],
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "one"}]},
            {"role": "assistant", "content": "two", "tool_calls": [{"id": "c"}]},
            "not a message",
        ],
    }
    assert [leaf.path for leaf in leaves(body)] == [
        "tools",
        "messages[0] (system).content",
        "messages[n] (assistant).content",
        "messages[n] (assistant).tool_calls",
    ]


@pytest.mark.parametrize(
    "body", [{}, {"messages": None}, {"messages": "x", "tools": 3}, {"tools": [None, {"function": 1}]}]
)
def test_odd_bodies_have_little_to_say(body: dict[str, Any]) -> None:
    assert all(leaf.path == "tools" for leaf in leaves(body))
    application(body)


def test_requests_without_bodies_are_passed_over() -> None:
    assert found_in(request(None, "s"), request(clocked(1), "s"), request(None, "s")) == []


def test_of_very_many_pairs_some_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.audit.divergence.PAIRS_MAX", 20)
    (one,) = found_in(*(request(clocked(number % 60)) for number in range(42)))
    assert one[2] == 14  # every third of 41


@pytest.mark.parametrize(
    ("left", "right", "count"), [("", "a", 0), ("abc", "abd", 2), ("abc", "abcd", 3), ("x", "y", 0)]
)
def test_common_characters(left: str, right: str, count: int) -> None:
    assert common_characters(left, right) == count
