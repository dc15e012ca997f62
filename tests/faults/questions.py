"""What is asked while things break, and what must be answered: known before the first byte of it comes.

A simulated worker's answer is drawn by its prompt, so the right one can be made here. Three tenants ask about the same
documents, each with an end of its own; a window of documents moves on, so that every tenant keeps meeting texts that
only others have sent.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import islice
from random import Random
from typing import Any, NamedTuple

from cachecore.prompts.plain import PlainRenderer
from tests.gateway.end_to_end.processes import BLOCK_TOKENS, MODEL
from workers.engine import Generation, Sampling
from workers.simulated.voice import voice_of

TENANTS = ("acme", "globex", "initech")
DOCUMENT_CHARACTERS = 320
DOCUMENTS_AT_ONCE = 30
QUESTIONS_PER_DOCUMENT = 12
ABORTED_SHARE = 0.2
STREAMED_SHARE = 0.5
OUTPUT_TOKENS = (8, 48)

_renderer = PlainRenderer()
_voice = voice_of(_renderer)


class Moment(StrEnum):
    """When a client gives up."""

    IN_HEAD = "in the head of its request"
    IN_BODY = "in the body of its request"
    WAITING = "while it waits for the answer"
    IN_ANSWER = "in the middle of the answer"


class Abort(NamedTuple):
    moment: Moment
    share: float
    """How far into the head, the body, the wait or the answer."""
    resets: bool
    """Whether the connection is reset; else it is closed."""


class Question(NamedTuple):
    id: str
    tenant: str
    document: int
    prompt: str
    """As it is rendered."""
    body: Mapping[str, Any]
    expected: str
    """The text of the right answer."""
    abort: Abort | None

    @property
    def streams(self) -> bool:
        return bool(self.body["stream"])


def questions(seed: int, count: int) -> Iterator[Question]:
    """One seed, one list: in exact shares, half are streams and a fifth is given up."""
    random = Random(f"questions:{seed}")
    streamed = _shuffled(random, count, STREAMED_SHARE)
    aborted = _shuffled(random, count, ABORTED_SHARE)
    for number in range(count):
        document = number // QUESTIONS_PER_DOCUMENT + random.randrange(DOCUMENTS_AT_ONCE)
        abort = None
        if aborted[number]:
            abort = Abort(random.choice(list(Moment)), random.random(), random.random() < 0.5)
        yield question(
            f"q{number:06d}",
            random.choice(TENANTS),
            document,
            _text(seed, document) + f" {number}?",
            streamed[number],
            random.randint(*OUTPUT_TOKENS),
            abort,
        )


def question(
    id: str, tenant: str, document: int, content: str, streams: bool, tokens: int, abort: Abort | None = None
) -> Question:
    messages = [{"role": "user", "content": content}]
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": tokens, "stream": streams}
    if streams:
        body["stream_options"] = {"include_usage": True}
    prompt = "".join(_renderer.chat(body).segments)
    return Question(id, tenant, document, prompt, body, expected_answer(prompt, tokens), abort)


def expected_answer(prompt: str, tokens: int) -> str:
    generation = Generation("", _renderer.encode(prompt), Sampling(max_tokens=tokens))
    return _renderer.decode(list(islice(_voice(generation), tokens)))


def _shuffled(random: Random, count: int, share: float) -> list[bool]:
    marks = [number < round(count * share) for number in range(count)]
    random.shuffle(marks)
    return marks


def _text(seed: int, document: int) -> str:
    """Its number comes first: no two documents share a block."""
    return f"{document:06d} " + "".join(Random(f"{seed}:{document}").choices("abcdefghij klmno", k=DOCUMENT_CHARACTERS))


class Sent:
    """What every tenant has sent so far, which bounds what may be found cached for it."""

    def __init__(self) -> None:
        self._prompts: defaultdict[tuple[str, int], list[Question]] = defaultdict(list)
        self.foreign = 0
        """Answers about texts that only other tenants had sent."""

    def add(self, question: Question) -> None:
        """From the moment that its first byte is sent, others may find it."""
        self._prompts[question.tenant, question.document].append(question)

    def own_tokens(self, question: Question) -> int:
        """Of its prompt, in whole blocks, what its tenant has sent with other questions."""
        own = [other for other in self._prompts[question.tenant, question.document] if other is not question]
        if not own:
            others = (tenant for tenant in TENANTS if tenant != question.tenant)
            self.foreign += any(self._prompts[tenant, question.document] for tenant in others)
        shared = max((_common(question.prompt, other.prompt) for other in own), default=0)
        return shared // BLOCK_TOKENS * BLOCK_TOKENS


def _common(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def first_blocks_differ(asked: Sequence[Question]) -> bool:
    """Whether no two documents begin alike, so that nothing may be found of a document that was never sent."""
    blocks = {(question.prompt[:BLOCK_TOKENS], question.document) for question in asked}
    return len({block for block, _ in blocks}) == len(blocks)
