"""A client that asks at a steady rate, whatever comes back, and accounts for every request.

Requests are due at their times and are not held up by slow answers: a gateway that stalls is measured by all that it
keeps waiting. Connections are kept alive and made as needed. No request is tried twice.
"""

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from random import Random
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from tests.gateway.end_to_end.processes import chat

ANSWER_SECONDS_MAX = 30.0
BODIES_KEPT = 4_000
BUCKETS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)


class Answered(NamedTuple):
    """One request, from the moment it was sent."""

    sent_at: float
    """On the monotonic clock."""
    seconds: float
    gateway: str
    failure: str
    """Empty for an answer that is complete and right."""
    worker: str = ""
    matched_tokens: int = 0
    """What the gateway said that the worker's events confirm."""
    cached_tokens: int = 0
    """What the worker says that it found."""


class Prompts:
    """Half of them share one of a few documents, some are new, some have been asked before."""

    def __init__(self, seed: int, documents: int = 40, characters: int = 320) -> None:
        self._random = Random(seed)
        self._documents = [self._text(characters) for _ in range(documents)]
        self.asked: deque[dict[str, Any]] = deque(maxlen=BODIES_KEPT)

    def next(self) -> dict[str, Any]:
        kind = self._random.random()
        if kind < 0.2 and self.asked:
            return self._random.choice(list(self.asked)[-200:])
        text = self._random.choice(self._documents) + self._text(60) if kind < 0.7 else self._text(240)
        body = chat(text, max_tokens=2)
        self.asked.append(body)
        return body

    def sample(self, count: int) -> list[dict[str, Any]]:
        """Some of those asked, the latest ones among them."""
        asked = list(self.asked)
        latest = asked[-count // 2 :]
        return latest + self._random.sample(asked[: -len(latest)], min(count - len(latest), len(asked) - len(latest)))

    def _text(self, characters: int) -> str:
        return "".join(self._random.choices("abcdefghij klmno", k=characters))


class Connection:
    """One kept-alive HTTP/1.1 connection; answers are framed by their length."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, host: str, port: int) -> Self:
        return cls(*await asyncio.open_connection(host, port))

    async def post(self, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers, body. Raises OSError, ValueError or asyncio.IncompleteReadError."""
        fields = f"host: gateway\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self._writer.write(f"POST {path} HTTP/1.1\r\n{fields}\r\n".encode() + body)
        status, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        return int(status.split()[1]), headers, await self._reader.readexactly(int(headers["content-length"]))

    def close(self) -> None:
        self._writer.close()


class LoadClient:
    """Asks `rate` requests a second of several gateways in turn, between `start` and `stop`."""

    def __init__(self, urls: Sequence[str], prompts: Prompts, rate: float) -> None:
        self.answers: list[Answered] = []
        self.late_ms_max = 0.0
        """How far this client itself fell behind."""
        self.prompts = prompts
        self._urls = list(urls)
        self._rate = rate
        self._idle: dict[str, list[Connection]] = {url: [] for url in urls}
        self._under_way: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._ticker = asyncio.create_task(self._tick(), name="load")

    async def stop(self) -> None:
        """Send nothing more, and wait for the answers that are due."""
        if self._ticker is not None:
            self._ticker.cancel()
            with suppress(asyncio.CancelledError):
                await self._ticker
        await asyncio.gather(*self._under_way)
        for connections in self._idle.values():
            while connections:
                connections.pop().close()

    def between(self, start: float, end: float) -> "Figures":
        return Figures([answer for answer in self.answers if start <= answer.sent_at < end])

    async def _tick(self) -> None:
        started = time.monotonic()
        number = 0
        while True:
            due = started + number / self._rate
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            self.late_ms_max = max(self.late_ms_max, (time.monotonic() - due) * 1e3)
            task = asyncio.create_task(self._ask(self._urls[number % len(self._urls)], self.prompts.next()))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
            number += 1

    async def _ask(self, url: str, body: Mapping[str, Any]) -> None:
        data = json.dumps(body).encode()
        sent_at = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                status, headers, answer = await self._exchange(url, data)
        except (OSError, ValueError, KeyError, asyncio.IncompleteReadError) as error:
            self.answers.append(Answered(sent_at, time.monotonic() - sent_at, url, repr(error)))
            return
        self.answers.append(_judged(sent_at, url, body, status, headers, answer))

    async def _exchange(self, url: str, data: bytes) -> tuple[int, dict[str, str], bytes]:
        idle = self._idle[url]
        parts = urlsplit(url)
        connection = idle.pop() if idle else await Connection.open(str(parts.hostname), int(parts.port or 80))
        try:
            answer = await connection.post("/v1/chat/completions", data)
        except BaseException:
            connection.close()
            raise
        idle.append(connection)
        return answer


def _judged(
    sent_at: float, url: str, body: Mapping[str, Any], status: int, headers: Mapping[str, str], answer: bytes
) -> Answered:
    seconds = time.monotonic() - sent_at
    worker, matched = headers.get("x-ropeway-worker", ""), int(headers.get("x-ropeway-matched-tokens", 0))
    if status != 200:
        return Answered(sent_at, seconds, url, f"{status}: {answer[:200]!r}", worker, matched)
    document = json.loads(answer)
    usage, (choice,) = document["usage"], document["choices"]
    whole = usage["completion_tokens"] == body["max_tokens"] and choice["finish_reason"] == "length"
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    failure = "" if whole else f"an answer cut short: {answer[:300]!r}"
    return Answered(sent_at, seconds, url, failure, worker, matched, cached)


class Figures:
    """Some requests, counted."""

    def __init__(self, answers: Sequence[Answered]) -> None:
        self.answers = answers
        self._ms = sorted(answer.seconds * 1e3 for answer in answers)

    @property
    def failures(self) -> list[Answered]:
        return [answer for answer in self.answers if answer.failure]

    def percentile_ms(self, share: float) -> float:
        return self._ms[min(int(len(self._ms) * share), len(self._ms) - 1)]

    def histogram(self) -> dict[str, int]:
        """Requests by the bound in milliseconds that they stayed below."""
        counts = Counter(next((f"<{bound}" for bound in BUCKETS_MS if ms < bound), "more") for ms in self._ms)
        return {name: counts[name] for name in (*(f"<{bound}" for bound in BUCKETS_MS), "more") if counts[name]}

    def report(self) -> dict[str, Any]:
        return {
            "requests": len(self.answers),
            "failed": len(self.failures),
            "p50_ms": round(self.percentile_ms(0.5), 1),
            "p99_ms": round(self.percentile_ms(0.99), 1),
            "max_ms": round(self._ms[-1], 1),
            "hit_share_of_matched": _share(self.answers),
            "histogram_ms": self.histogram(),
        }


def _share(answers: Sequence[Answered]) -> float | None:
    """Matched tokens that were found; None when none were matched."""
    matched = sum(answer.matched_tokens for answer in answers)
    found = sum(min(answer.matched_tokens, answer.cached_tokens) for answer in answers)
    return round(found / matched, 4) if matched else None
