"""Forty conversations with one system prompt on four workers: the load is spread, and hardly a cached token is missed.

The load is 60 % of what the workers can do: of the rate at which they finish such requests when all their slots are
always full.

What the best placement hits: each worker computes the system prompt once, a conversation's own history is always there,
in whole blocks, but for the block that a full hit gives up.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from os.path import commonprefix
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx
import pytest

from cachecore.prompts.plain import PlainRenderer
from tests.gateway.end_to_end.processes import (
    MODEL,
    Fleet,
    Gateway,
    token_count,
    whole_blocks,
    worker_of,
)
from workers.timing import Chunk, DecodeLoad, profile_named

pytestmark = pytest.mark.stacks

WORKERS = 4
CONVERSATIONS = 40
TURNS = 6
LOAD = 0.6
SPEED = 0.25
"""Slow workers: the load is then theirs and not that of the machine which runs the test."""
SEQUENCES_MAX = 8
OUTPUT_TOKENS = 32
PROFILE = "llama-3-8b"

SYSTEM = {"role": "system", "content": ("You answer briefly and never guess. " * 40)[:1000]}
SHARE_MIN = 0.15
MISSED_POINTS_MAX = 3.0


def capacity_per_second() -> float:
    """Requests that one worker finishes in a second when `SEQUENCES_MAX` of them always run: each has its prefill's
    step, and its part of the decode steps."""
    profile = profile_named(PROFILE)
    new, context = 230, 1_600
    prefill = profile.prefill_seconds([Chunk(new, context)])
    decode = profile.decode_seconds(DecodeLoad(SEQUENCES_MAX, SEQUENCES_MAX * (context + new)))
    return SPEED / (prefill + OUTPUT_TOKENS * decode / SEQUENCES_MAX)


class Answer(NamedTuple):
    worker: str
    text: str
    prompt_tokens: int
    cached_tokens: int


class Turn(NamedTuple):
    worker: str
    prompt_tokens: int
    cached_tokens: int
    history_tokens: int
    """What the best placement finds of this conversation's former turn."""


@dataclass
class Run:
    turns: list[Turn] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return sum(turn.prompt_tokens for turn in self.turns)

    @property
    def hit_share(self) -> float:
        return sum(turn.cached_tokens for turn in self.turns) / self.prompt_tokens

    @property
    def shares(self) -> dict[str, float]:
        counts = Counter(turn.worker for turn in self.turns)
        return {worker: count / len(self.turns) for worker, count in sorted(counts.items())}

    @property
    def best_share(self) -> float:
        history = sum(turn.history_tokens for turn in self.turns)
        first_turns = sum(turn.history_tokens == 0 for turn in self.turns)
        return (history + (first_turns - len(self.shares)) * system_tokens()) / self.prompt_tokens

    def report(self) -> str:
        missed = [turn for turn in self.turns if turn.cached_tokens < turn.history_tokens]
        return (
            f"hit {self.hit_share:.2%}, best {self.best_share:.2%}, "
            f"{len(missed)} of {len(self.turns)} turns away from their history, requests per worker "
            + ", ".join(f"{share:.1%}" for share in self.shares.values())
        )


def system_tokens() -> int:
    """Tokens, in whole blocks, that every conversation's prompts begin with."""
    prompts = [[SYSTEM, {"role": "user", "content": letter}] for letter in "ab"]
    texts = ["".join(PlainRenderer().chat({"messages": messages}).segments) for messages in prompts]
    return whole_blocks(len(commonprefix(texts)))  # noqa: RUF071 (texts, not paths)


def question(random: Random, number: int) -> str:
    return f"{number} " + "".join(random.choice("abcdefghij klmno") for _ in range(180))


async def converse(
    http: httpx.AsyncClient, number: int, period_seconds: float, spread: bool, streamed: bool, run: Run
) -> None:
    random = Random(number)
    loop = asyncio.get_running_loop()
    started = loop.time()
    messages: list[dict[str, Any]] = [SYSTEM]
    history = 0
    for turn in range(TURNS):
        # Due once a period, at a random moment of it, however late answers come: the load that is offered does not fall
        # with the speed that is found.
        due = started + (turn + random.random()) * period_seconds if turn or spread else started
        await asyncio.sleep(max(due - loop.time(), 0.0))
        messages.append({"role": "user", "content": question(random, number)})
        answer = await ask(http, messages, streamed)
        assert answer.prompt_tokens == token_count(messages)
        run.turns.append(Turn(answer.worker, answer.prompt_tokens, answer.cached_tokens, history))
        messages.append({"role": "assistant", "content": answer.text})
        history = whole_blocks(answer.prompt_tokens + OUTPUT_TOKENS - 1)


async def ask(http: httpx.AsyncClient, messages: list[dict[str, Any]], streamed: bool) -> Answer:
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": OUTPUT_TOKENS}
    if streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    if streamed:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
        usage = events[-1]["usage"]
    else:
        document = answer.json()
        text, usage = document["choices"][0]["message"]["content"], document["usage"]
    assert usage["completion_tokens"] == OUTPUT_TOKENS
    details = usage["prompt_tokens_details"] or {}
    return Answer(worker_of(answer), text, usage["prompt_tokens"], details.get("cached_tokens") or 0)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    flags = ("--speed", str(SPEED), "--profile", PROFILE, "--max-sequences", str(SEQUENCES_MAX))
    with Fleet(tmp_path, *flags, count=WORKERS) as fleet, Gateway(tmp_path, fleet.urls) as gateway:
        yield gateway


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spread", "streamed"), [(False, True), (True, False)], ids=["at-once-streamed", "spread-in-one-piece"]
)
async def test_forty_conversations_are_spread_and_miss_hardly_a_cached_token(
    gateway: Gateway, spread: bool, streamed: bool
) -> None:
    period_seconds = CONVERSATIONS / (LOAD * WORKERS * capacity_per_second())
    run = Run()
    limits = httpx.Limits(max_connections=CONVERSATIONS)
    async with (
        httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False, limits=limits) as http,
        asyncio.TaskGroup() as conversations,
    ):
        for number in range(CONVERSATIONS):
            conversations.create_task(converse(http, number, period_seconds, spread, streamed, run))
    print(run.report())
    assert len(run.turns) == CONVERSATIONS * TURNS
    assert len(run.shares) == WORKERS, run.report()
    assert min(run.shares.values()) >= SHARE_MIN, run.report()
    assert 100 * (run.best_share - run.hit_share) <= MISSED_POINTS_MAX, run.report()
