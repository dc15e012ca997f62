"""Conversations in ShareGPT's form, and FastChat's questions.

    {"id": "identity_0", "conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "I am"}]}
    {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."]}

Turns are a closed loop. What a model answered to a question of the second form is not there; text of the assumed length
stands in for it, since the next turn's prompt holds it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadtest.traces.parsing import Format, Parsed, ReadOptions, Sample
from loadtest.traces.prose import prose
from loadtest.traces.rows import RowError, Tally, json_rows, understood
from loadtest.traces.texts import TextDrafts

_CHARACTERS_PER_TOKEN = 4
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "tool": "tool",
    "function_call": "assistant",
    "observation": "tool",
}


def _messages(conversation: Any) -> list[dict[str, str]]:
    if not isinstance(conversation, list) or not conversation:
        raise RowError("`conversations` is no list of turns")
    return [{"role": _role(turn["from"]), "content": _text(turn["value"])} for turn in conversation]


def _role(name: Any) -> str:
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise RowError(f"nobody is called {name!r}; known are {', '.join(_ROLES)}")
    return role


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise RowError(f"a turn's `value` is {type(value).__name__}, not text")
    return value


def _read_conversations(path: Path, options: ReadOptions) -> Parsed:
    texts, tally = TextDrafts(options), Tally(path, "sharegpt", noun="row")

    def add(row: Mapping[str, Any]) -> None:
        messages = _messages(row.get("conversations", row.get("conversation")))
        texts.converse(messages, session=str(row.get("id", f"row-{tally.rows}")))

    understood(json_rows(path, options.progress), add, tally)
    return texts.parsed(tally)


def with_stand_ins(questions: list[list[dict[str, Any]]], key: object, output_tokens: int) -> list[dict[str, Any]]:
    """The messages of turns whose answers are unknown, with text of the assumed length for each but the last."""
    messages: list[dict[str, Any]] = []
    for turn, question in enumerate(questions):
        if turn:
            answer = prose(("answer", str(key), turn), output_tokens * _CHARACTERS_PER_TOKEN)
            messages.append({"role": "assistant", "content": answer})
        messages += question
    return messages


def _read_questions(path: Path, options: ReadOptions) -> Parsed:
    texts, tally = TextDrafts(options), Tally(path, "fastchat-questions")

    def add(row: Mapping[str, Any]) -> None:
        questions = [[{"role": "user", "content": _text(turn)}] for turn in row["turns"]]
        messages = with_stand_ins(questions, row["question_id"], options.output_tokens)
        texts.converse(messages, session=f"question-{row['question_id']}")

    understood(json_rows(path, options.progress), add, tally)
    return texts.parsed(tally, ["answers between turns are stand-ins of the assumed length"])


def _holds_conversations(sample: Sample) -> bool:
    conversation = sample.keys.get("conversations", sample.keys.get("conversation"))
    return isinstance(conversation, list) and (not conversation or "from" in conversation[0])


SHAREGPT = Format(
    "sharegpt",
    "ShareGPT: conversations of human and gpt, as text",
    _holds_conversations,
    _read_conversations,
)
FASTCHAT_QUESTIONS = Format(
    "fastchat-questions",
    "FastChat (MT-bench): questions in turns, without answers",
    lambda sample: sample.has("question_id", "turns"),
    _read_questions,
)
