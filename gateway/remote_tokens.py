"""Token ids of prompts that only their engine can tell: Harmony's, tekken's, DeepSeek's, or those of a model without a
tokenizer here.

A request waits for them no longer than a deadline, and is then placed by load. The question goes on all the same: its
answer is there for whoever asks again under the same naming: how long one waits says nothing of what other tenants
have asked. Where one deadline after another passes, nobody waits for a while.
"""

import asyncio
import hashlib
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.fleet.worker import ModelPool

logger = logging.getLogger("ropeway.prompts")

QUESTIONS_MAX = 64
"""Under way at once; further prompts are placed by load."""
LATE_MAX = 8
"""Answers in a row that came too late, before nobody waits for `PAUSE_SECONDS`."""
PAUSE_SECONDS = 5.0
_ENTRY_BYTES = 300

AskEngine = Callable[[ModelPool, Mapping[str, Any]], Awaitable[Sequence[int] | None]]


@dataclass(slots=True)
class RemoteCounters:
    """They only grow."""

    hits: int = 0
    asked: int = 0
    failed: int = 0
    """Nobody could tell."""
    late: int = 0
    skipped: int = 0
    """Too many questions were under way, or answers had been late."""


class RemoteTokens:
    """Asks, and remembers within `bytes_max`. Belongs to one event loop."""

    def __init__(
        self, ask: AskEngine, seconds_max: float, bytes_max: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counters = RemoteCounters()
        self._ask = ask
        self._seconds_max = seconds_max
        self._bytes_max = bytes_max
        self._clock = clock
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()
        self._bytes = 0
        self._asking: dict[bytes, asyncio.Task[array[int] | None]] = {}
        self._late_in_a_row = 0
        self._paused_until = 0.0

    def known(self, pool: ModelPool, question: Mapping[str, Any], root: bytes) -> "array[int] | None":
        """Token ids that were told before."""
        return self._known.get(_key(pool, question, root))

    async def tokens(self, pool: ModelPool, question: Mapping[str, Any], root: bytes) -> "array[int] | None":
        """Token ids of a prompt, named from `root` on; None when they are not to be had in time."""
        key = _key(pool, question, root)
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            self.counters.hits += 1
            return known
        task = self._asking.get(key)
        if task is None:
            if len(self._asking) >= QUESTIONS_MAX or self._clock() < self._paused_until:
                self.counters.skipped += 1
                return None
            task = self._asking[key] = asyncio.create_task(self._learn(key, pool, question), name="tokenize remotely")
            task.add_done_callback(lambda _: self._asking.pop(key, None))
        # The task itself is not cancelled: what it learns is remembered.
        done, _ = await asyncio.wait((task,), timeout=self._seconds_max)
        if not done:
            self._too_late()
            return None
        self._late_in_a_row = 0
        return None if task.cancelled() else task.result()

    async def stop(self) -> None:
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _learn(self, key: bytes, pool: ModelPool, question: Mapping[str, Any]) -> "array[int] | None":
        self.counters.asked += 1
        try:
            found = await self._ask(pool, question)
            tokens = None if found is None else array("I", found)
        except (OverflowError, TypeError):
            tokens = None
        except Exception:
            logger.exception("asking for token ids failed")
            tokens = None
        if tokens is None:
            self.counters.failed += 1
        else:
            self._remember(key, tokens)
        return tokens

    def _remember(self, key: bytes, tokens: "array[int]") -> None:
        self._known[key] = tokens
        self._bytes += _size(tokens)
        while self._bytes > self._bytes_max and self._known:
            self._bytes -= _size(self._known.popitem(last=False)[1])

    def _too_late(self) -> None:
        self.counters.late += 1
        self._late_in_a_row += 1
        if self._late_in_a_row >= LATE_MAX:
            self._late_in_a_row = 0
            self._paused_until = self._clock() + PAUSE_SECONDS
            logger.warning("engines are too slow to tokenize: prompts are placed by load for %g s", PAUSE_SECONDS)


def _size(tokens: "array[int]") -> int:
    return len(tokens) * tokens.itemsize + _ENTRY_BYTES


def _key(pool: ModelPool, question: Mapping[str, Any], root: bytes) -> bytes:
    text = orjson.dumps([pool.generation, question], option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return hashlib.blake2b(text, digest_size=16, key=root).digest()
