"""A worker under test, and what a gateway can see of it from outside."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any, TypeVar

import httpx
import zmq
import zmq.asyncio

from cachecore.prompts.contract import Renderer
from tests.workers.following import Follower

_TOKENS = range(32, 97)
"""What each of the vocabularies has, and none gives a meaning."""
_END_OF_REPLAY = b"\xff" * 8
_EVENTS_SECONDS_MAX = 20.0

_numbers = count()

Seen = TypeVar("Seen")


@dataclass(frozen=True, slots=True)
class Lab:
    http: httpx.AsyncClient
    """To the worker's own port."""
    model: str
    renderer: Renderer
    block_tokens: int
    live_endpoint: str
    live_binds: bool
    """Whether the subscriber binds the live endpoint; the worker then connects to it."""
    replay_endpoint: str
    topic: str
    eviction_tokens: int
    """So many computed tokens push out whatever was cached before."""

    def prompt(self, tokens: int) -> list[int]:
        """Token ids that begin like those of no other prompt."""
        random = Random(f"{time.time()} {next(_numbers)}")  # also among tests of one long-lived worker
        return random.choices(_TOKENS, k=tokens)

    def whole_blocks(self, tokens: int) -> int:
        return tokens // self.block_tokens * self.block_tokens

    def full_hit(self, tokens: int) -> int:
        """What can be cached of a prompt at all: its last token is computed again, and with it that token's block."""
        return self.whole_blocks(tokens - 1)

    # Requests

    async def complete(self, prompt: Sequence[int] | str, **fields: Any) -> Mapping[str, Any]:
        """The answer's document; one token, unless told otherwise."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
        return await self._post("/v1/completions", body)

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Mapping[str, Any]:
        body = {"model": self.model, "messages": messages, "max_tokens": 1, "temperature": 0, **fields}
        return await self._post("/v1/chat/completions", body)

    async def cached(self, prompt: Sequence[int], **fields: Any) -> int:
        """What the worker says it had of a prompt."""
        return cached_tokens((await self.complete(prompt, **fields))["usage"])

    async def tokenize(self, **question: Any) -> list[int]:
        document = await self._post("/tokenize", {"model": self.model, **question})
        assert document["count"] == len(document["tokens"])
        return document["tokens"]  # type: ignore[no-any-return]

    async def _post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    async def sample(self, metric: str) -> float:
        """The sum over a metric's labels."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((metric + "{", metric + " ")))

    # Events

    async def follow(self) -> Follower:
        """What the events so far amount to."""
        batches = await replayed(self.replay_endpoint)
        assert [sequence for sequence, _ in batches] == list(range(len(batches)))
        follower = Follower()
        for _, payload in batches:
            follower.take(payload)
        return follower

    async def follow_until(self, condition: Callable[[Follower], bool], what: str) -> Follower:
        """What the events amount to once they say so: a publisher sends them a moment after the answer."""
        return await eventually(self.follow, condition, what)

    def held(self, follower: Follower, prompt: Sequence[int], salt: str = "") -> int:
        """Leading tokens of a prompt that the events say are cached."""
        held, tokens = follower.held(), 0
        while tokens + self.block_tokens <= len(prompt):
            if (salt, "", tuple(prompt[: tokens + self.block_tokens])) not in held:
                break
            tokens += self.block_tokens
        return tokens

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[zmq.asyncio.Socket]:
        """The live stream, from some moment on."""
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as live:
            live.linger = 0
            live.subscribe(self.topic)
            if self.live_binds:
                live.bind(self.live_endpoint)
            else:
                live.connect(self.live_endpoint)
            yield live


async def replayed(endpoint: str) -> list[tuple[int, bytes]]:
    """Sequence and payload of every batch that a publisher can send again."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(endpoint)
        await dealer.send_multipart([b"", bytes(8)])
        batches = []
        while True:
            async with asyncio.timeout(_EVENTS_SECONDS_MAX):
                _, _, sequence, payload = await dealer.recv_multipart()
            if sequence == _END_OF_REPLAY:
                return batches
            batches.append((int.from_bytes(sequence, "big"), payload))


async def eventually(
    look: Callable[[], Awaitable[Seen]], condition: Callable[[Seen], bool], what: str, seconds: float = 20.0
) -> Seen:
    """Look again and again until what is seen is right."""
    limit = time.monotonic() + seconds
    while not condition(seen := await look()):
        assert time.monotonic() < limit, f"it did not come true: {what}"
        await asyncio.sleep(0.02)
    return seen


def cached_tokens(usage: Mapping[str, Any]) -> int:
    details = usage["prompt_tokens_details"]
    return int(details["cached_tokens"] or 0) if details else 0


def data_of(lines: Iterable[str]) -> list[str]:
    """The data of server-sent events."""
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
