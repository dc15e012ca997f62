"""One choice of an answer: a generation's tokens become text, logprobs and a finish reason.

`follow` runs a set of choices on the engine at once and yields what each gains, as it comes. Closing it (or cancelling
the task that reads it) aborts what still runs.
"""

import asyncio
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from cachecore.scope import Fidelity
from workers.engine import Engine, Generation, StepOutput, TokenLogprob, TransferReport
from workers.openai.text import StopScanner, TextStream


class Delta(NamedTuple):
    """What a choice gained by one engine step."""

    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engine gets it; `text` is None where the client gave token ids."""

    token_ids: "array[int]"
    text: str | None = None


class Choice:
    """State of one choice while it is generated."""

    def __init__(
        self, index: int, prompt: Prompt, generation: Generation, engine: Engine, stops: Sequence[str]
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.generation = generation
        self.stop_reason: str | int | None = None
        self.finish_reason: str | None = None
        self.cached_tokens = 0
        self.fidelity = Fidelity.EXACT
        self.transfer: TransferReport | None = None
        self.output_tokens = 0
        self.prompt_logprobs: Sequence[TokenLogprob | None] | None = None
        self._stream = TextStream(partial(engine.renderer.decode, skip_special_tokens=True))
        self._scanner = StopScanner(stops)
        sampling = generation.sampling
        self._stop_tokens = frozenset(sampling.stop_token_ids)
        self._silent_tokens = self._stop_tokens | frozenset(() if sampling.ignore_eos else engine.stop_token_ids())

    def feed(self, output: StepOutput) -> Delta:
        """Take what a step brought. Once `finish_reason` is set, close the generation and feed nothing more."""
        self.cached_tokens = output.cached_tokens
        self.fidelity = output.fidelity
        self.transfer = self.transfer or output.transfer
        self.output_tokens += len(output.token_ids)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        scanned = self._scanner.feed(self._stream.feed(self._spoken(output)))
        text = scanned.text
        if scanned.stop is None and output.finish_reason is not None:
            scanned = self._scanner.feed(self._stream.flush())
            text += scanned.text
        if scanned.stop is not None:
            self.finish_reason, self.stop_reason = "stop", scanned.stop
        elif output.finish_reason is not None:
            text += self._scanner.flush()
            self.finish_reason = output.finish_reason
        return Delta(text, output.logprobs, self.finish_reason)

    def _spoken(self, output: StepOutput) -> Sequence[int]:
        """The tokens that are text: all but one that ended the generation."""
        tokens = output.token_ids
        if output.finish_reason != "stop" or not tokens or tokens[-1] not in self._silent_tokens:
            return tokens
        if tokens[-1] in self._stop_tokens:
            self.stop_reason = tokens[-1]
        return tokens[:-1]


class Gain(NamedTuple):
    choice: Choice
    delta: Delta


async def follow(engine: Engine, choices: Sequence[Choice]) -> AsyncGenerator[Gain, None]:
    """Generate all choices; each one's gains in order, the choices interleaved. Raises what the engine raises."""
    gains = _follow_many(engine, choices) if len(choices) > 1 else _follow_one(engine, choices[0])
    async with aclosing(gains):
        async for gain in gains:
            yield gain


async def _follow_one(engine: Engine, choice: Choice) -> AsyncGenerator[Gain, None]:
    outputs = engine.generate(choice.generation)
    try:
        async for output in outputs:
            yield Gain(choice, choice.feed(output))
            if choice.finish_reason is not None:
                return
    finally:
        await _close(outputs)


async def _follow_many(engine: Engine, choices: Sequence[Choice]) -> AsyncGenerator[Gain, None]:
    # Bounded by what choices may generate: each of their tokens is in it once.
    arrivals: asyncio.Queue[Gain | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(engine, choice, arrivals)) for choice in choices]
    running = len(tasks)
    try:
        while running:
            match await arrivals.get():
                case None:
                    running -= 1
                case Gain() as gain:
                    yield gain
                case Exception() as error:
                    raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(engine: Engine, choice: Choice, arrivals: "asyncio.Queue[Gain | Exception | None]") -> None:
    try:
        async with aclosing(_follow_one(engine, choice)) as gains:
            async for gain in gains:
                arrivals.put_nowait(gain)
    except Exception as error:
        arrivals.put_nowait(error)
    else:
        arrivals.put_nowait(None)


async def _close(outputs: object) -> None:
    close = getattr(outputs, "aclose", None)
    if close is not None:
        await close()
