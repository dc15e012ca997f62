"""A trace made ready for replays: names cut out once, arrivals by load and seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from cachecore.blocks import HASH_BYTES, Chain
from loadtest.traces.arrivals import grid_seconds
from loadtest.traces.contract import NO_PREDECESSOR, Trace


class PreparedRequest(NamedTuple):
    """One request as engines and router take it."""

    request_id: str
    chain: Chain
    """Of the prompt's full blocks: engines name no others."""
    names: Sequence[bytes]
    """The same, one by one."""
    prompt_tokens: int
    output_tokens: int
    """At least one."""
    session: str
    follows: int
    delay_seconds: float


class Arrivals(NamedTuple):
    """When requests come; in seconds."""

    open: Sequence[tuple[float, int]]
    """(arrival, number) of requests that wait for nobody, in order of arrival."""
    earliest: Sequence[float]
    """By number; what a request that follows another may not come before."""


@dataclass(frozen=True, slots=True)
class PreparedTrace:
    name: str
    block_size_tokens: int
    requests: Sequence[PreparedRequest]
    arrivals_seconds: Sequence[float]
    """As the trace has them, by number."""
    followers: dict[int, list[int]]
    """Numbers of the requests that wait for the end of one."""
    grid_seconds: float
    """That arrivals stand on; 0 where they stand on none."""

    def arrivals(self, load: float, jitter_seconds: float = 0.0, seed: int = 0) -> Arrivals:
        """Arrivals `load` times as dense as in the trace. `jitter_seconds`, in the trace's time, moves each arrival by
        up to so much either way: half of a coarse clock's grid takes away the bursts that nobody sent.

        Pauses of a closed loop stay as long as they are: people do not think faster when there are more of them.
        """
        if not load > 0 or jitter_seconds < 0:
            raise ValueError("load must be positive, and jitter not negative")
        times = list(self.arrivals_seconds)
        if jitter_seconds:
            random = Random(seed)
            times = [max(time + random.uniform(-jitter_seconds, jitter_seconds), 0.0) for time in times]
        times = [time / load for time in times]
        open_loop = [
            (times[number], number) for number, request in enumerate(self.requests) if request.follows == NO_PREDECESSOR
        ]
        open_loop.sort()
        return Arrivals(open_loop, times)


def prepare(trace: Trace) -> PreparedTrace:
    """Equal names become one object, which engines compare."""
    rows, block = trace.requests, trace.block_size_tokens
    interned: dict[bytes, bytes] = {}
    requests: list[PreparedRequest] = []
    followers: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        full = min(row.input_tokens // block, row.blocks)
        chain = Chain(row.chain[: full * HASH_BYTES])
        names = [chain[start : start + HASH_BYTES] for start in range(0, len(chain), HASH_BYTES)]
        names = [interned.setdefault(name, name) for name in names]
        output_tokens = max(row.output_tokens, 1)
        requests.append(
            PreparedRequest(
                str(number), chain, names, row.input_tokens, output_tokens, row.session, row.follows, row.delay_seconds
            )
        )
        if row.follows != NO_PREDECESSOR:
            followers.setdefault(row.follows, []).append(number)
    arrivals = [row.arrival_seconds for row in rows]
    return PreparedTrace(trace.name, block, requests, arrivals, followers, grid_seconds(arrivals))
