"""Asking engines for token ids: remembered, shared, and waited for no longer than is worth it."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gateway.fleet.worker import ModelPool
from gateway.remote_tokens import LATE_MAX, PAUSE_SECONDS, QUESTIONS_MAX, RemoteTokens

POOL = ModelPool("m")
ROOT, OTHER_ROOT = bytes(16), bytes([1] * 16)
"""Of two tenants."""
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


class Engine:
    """Tells a prompt's length; waits for `release` first, if told to."""

    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []
        self.release: asyncio.Event | None = None
        self.answer: Any = None

    async def __call__(self, pool: ModelPool, question: Mapping[str, Any]) -> Sequence[int] | None:
        self.asked.append(question)
        if self.release is not None:
            await self.release.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer if self.answer is not None else [len(self.asked)] * 4


def question(number: int) -> dict[str, Any]:
    return {"model": "m", "prompt": f"{number}"}


async def test_an_answer_is_remembered_however_the_question_is_written() -> None:
    engine = Engine()
    remote = RemoteTokens(engine, 1.0, 10_000)
    first = await remote.tokens(POOL, HELLO, ROOT)
    assert first is not None
    assert first.tolist() == [1, 1, 1, 1]
    assert await remote.tokens(POOL, dict(reversed(HELLO.items())), ROOT) is first
    assert remote.known(POOL, HELLO, ROOT) is first
    assert remote.known(POOL, question(1), ROOT) is None
    assert remote.known(POOL, HELLO, OTHER_ROOT) is None
    assert (remote.counters.asked, remote.counters.hits) == (1, 1)
    # Names made before are void: another engine may render otherwise.
    assert await remote.tokens(ModelPool("m", generation=1), HELLO, ROOT) != first


async def test_two_who_ask_the_same_share_a_question() -> None:
    engine = Engine()
    engine.release = asyncio.Event()
    remote = RemoteTokens(engine, 5.0, 10_000)
    both = asyncio.gather(remote.tokens(POOL, HELLO, ROOT), remote.tokens(POOL, HELLO, ROOT))
    await asyncio.sleep(0)
    engine.release.set()
    one, other = await both
    assert one is other
    assert len(engine.asked) == 1


async def test_a_late_answer_is_there_for_the_next_one() -> None:
    engine = Engine()
    engine.release = asyncio.Event()
    remote = RemoteTokens(engine, 0.01, 10_000)
    assert await remote.tokens(POOL, HELLO, ROOT) is None
    assert remote.counters.late == 1
    engine.release.set()
    while remote.known(POOL, HELLO, ROOT) is None:
        await asyncio.sleep(0)
    assert await remote.tokens(POOL, HELLO, ROOT) is not None
    assert len(engine.asked) == 1


async def test_where_answers_are_late_again_and_again_nobody_waits_for_a_while() -> None:
    now, engine = 0.0, Engine()
    engine.release = asyncio.Event()
    remote = RemoteTokens(engine, 0.001, 10_000, clock=lambda: now)
    for number in range(LATE_MAX):
        assert await remote.tokens(POOL, question(number), ROOT) is None
    assert await remote.tokens(POOL, question(99), ROOT) is None
    assert (len(engine.asked), remote.counters.skipped) == (LATE_MAX, 1)
    engine.release.set()
    now = PAUSE_SECONDS
    while await remote.tokens(POOL, question(100), ROOT) is None:
        await asyncio.sleep(0)
    await remote.stop()


async def test_questions_under_way_are_bounded() -> None:
    engine = Engine()
    engine.release = asyncio.Event()
    remote = RemoteTokens(engine, 5.0, 10_000)
    waiting = [asyncio.create_task(remote.tokens(POOL, question(number), ROOT)) for number in range(QUESTIONS_MAX)]
    while len(engine.asked) < QUESTIONS_MAX:
        await asyncio.sleep(0)
    assert await remote.tokens(POOL, question(-1), ROOT) is None
    await remote.stop()
    assert await asyncio.gather(*waiting) == [None] * QUESTIONS_MAX


async def test_memory_is_bounded() -> None:
    remote = RemoteTokens(Engine(), 1.0, 5 * 320)
    for number in range(20):
        await remote.tokens(POOL, question(number), ROOT)
    known = [number for number in range(20) if remote.known(POOL, question(number), ROOT) is not None]
    assert known == [15, 16, 17, 18, 19]


@pytest.mark.parametrize("answer", [[-1], [2**32], ["a"], RuntimeError("gone")])
async def test_what_makes_no_sense_leaves_a_prompt_unnamed(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.answer = answer
    remote = RemoteTokens(engine, 1.0, 10_000)
    assert await remote.tokens(POOL, HELLO, ROOT) is None
    assert remote.counters.failed == 1
