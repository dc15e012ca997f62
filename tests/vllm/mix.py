"""Sixty requests as clients of a small service make them: conversations, shared documents, repetitions, salts."""

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from tests.vllm.servers import MODEL

ANSWER_TOKENS = 12
TURNS = 6
_WORDS = (
    "river castle market harbour bridge tower garden station museum library street square island forest mountain "
    "valley winter summer morning evening bread water stone glass paper silver letter window journey teacher"
)
_SYSTEM_PROMPTS = ("You are a guide to an old city. ", "You keep the books of a small shop. ")


class Ask(NamedTuple):
    label: str
    body: Mapping[str, Any]
    path: str = "/v1/chat/completions"


class Conversation:
    """Each turn repeats all that was said before it."""

    def __init__(self, number: int, words: "Words") -> None:
        self.number = number
        self._words = words
        opening = _SYSTEM_PROMPTS[number % len(_SYSTEM_PROMPTS)]
        self._messages = [{"role": "system", "content": opening * 12}]

    def ask(self) -> Ask:
        self._messages.append({"role": "user", "content": f"Tell me of {self._words.some(20)}."})
        return Ask(f"turn of conversation {self.number}", chat(self._messages))

    def answered(self, text: str) -> None:
        self._messages.append({"role": "assistant", "content": text})


class Words:
    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._words = _WORDS.split()

    def some(self, count: int) -> str:
        return " ".join(self._random.choices(self._words, k=count))

    def tokens(self, count: int) -> list[int]:
        return self._random.choices(range(1000, 40_000), k=count)


def chat(messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": list(messages), "max_tokens": ANSWER_TOKENS, "temperature": 0, **fields}


def about_a_document(document: str, words: Words, count: int = 4) -> list[Ask]:
    """Questions that share all but their end."""
    opening = {"role": "user", "content": f"A document follows. {document}"}
    questions = [{"role": "user", "content": f"What does it say of {words.some(3)}?"} for _ in range(count)]
    return [Ask("question about a document", chat([opening, question])) for question in questions]


def repeated(words: Words) -> Iterator[Ask]:
    """Twice the same, whole and as a stream."""
    for fields in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        body = chat([{"role": "user", "content": words.some(60)}], **fields)
        yield from [Ask("equal prompts", body)] * 2


def token_ids(words: Words) -> Iterator[Ask]:
    """A prompt as token ids, then with more behind it."""
    prompt = words.tokens(150)
    for length in (150, 120, 150, 96):
        body = {"model": MODEL, "prompt": prompt[:length] + words.tokens(10), "max_tokens": 4, "temperature": 0}
        yield Ask("token ids", body, "/v1/completions")


def salted(words: Words) -> Iterator[Ask]:
    """One prompt under clients' salts, that must not meet."""
    messages = [{"role": "user", "content": words.some(80)}]
    for salt in ("blue", "green", "blue", None, "green", None):
        yield Ask(f"salt {salt}", chat(messages, **({"cache_salt": salt} if salt else {})))
