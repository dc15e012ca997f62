"""What a workload is: a seeded generator of requests, with the size and the rate it is usually run at."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from loadtest.traces.building import Draft
from loadtest.traces.pieces import Beginning, PromptTree
from loadtest.workloads.text import CHARACTERS_PER_TOKEN, chat_body


@dataclass(frozen=True, slots=True)
class Setting:
    """What a generator draws from. Equal settings give equal requests."""

    rng: Random
    tree: PromptTree
    rate: float
    """Units a second; `Workload.unit` says of what."""
    requests: int
    bodies: bool = False
    characters_per_token: float = CHARACTERS_PER_TOKEN

    def request(
        self,
        prompt: Beginning,
        arrival_seconds: float,
        output_tokens: int,
        *,
        session: str = "",
        tenant: str = "",
        follows: Draft | None = None,
        delay_seconds: float = 0.0,
    ) -> Draft:
        body = chat_body(prompt, output_tokens, self.characters_per_token) if self.bodies else None
        return Draft(
            arrival_seconds, prompt.tokens, output_tokens, prompt.chain, session, tenant, follows, delay_seconds, body
        )

    def after(self, previous: Draft, prompt: Beginning, pause_seconds: float, output_tokens: int) -> Draft:
        """The next request of a conversation, which comes so long after the end of the one before."""
        return self.request(
            prompt,
            previous.arrival_seconds + pause_seconds,
            output_tokens,
            session=previous.session,
            tenant=previous.tenant,
            follows=previous,
            delay_seconds=pause_seconds,
        )


Generator = Callable[[Setting], Iterator[Draft]]
"""Yields for ever, a conversation's requests one after the other, conversations in order of their beginning."""


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    summary: str
    """One line for `--help`."""
    generator: Generator = field(repr=False)
    rate: float
    unit: str = "requests"
    """What arrives at `rate` a second: requests, conversations, groups."""
    requests: int = 4_000
    workers: int = 8
    """The fleet that the rate is meant for."""
    cache_tokens: int | None = None
    """KV of each worker where the workload is meant to be tight; None for the engine's own."""
