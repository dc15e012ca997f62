"""What a trace is, whatever file it came from: requests with arrival times, lengths and the names of their blocks.

Names are `cachecore.blocks` chains: 16 bytes a block, chained, so that an equal name at depth n means equal text up to
there. Where a file holds block ids, an id within its scope (the file, or one conversation) is its block's name; where
it holds text or tokens, blocks are named as the gateway names them. The audit and the load client read the same form.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash

NO_PREDECESSOR = -1


class TraceError(ValueError):
    """A file that cannot be read as a trace: says which file, which line where there is one, and which format it is."""


class TraceRequest(NamedTuple):
    """One request of a trace. Requests stand in order of `arrival_seconds`."""

    arrival_seconds: float
    """After the start of the trace. Of a request that follows another, the earliest it may come."""
    chain: Chain
    """Names of the prompt's blocks: the full ones and, where the file names it, the partly filled last one."""
    input_tokens: int
    output_tokens: int
    session: str = ""
    """Key of the conversation; empty where the file knows none."""
    tenant: str = ""
    follows: int = NO_PREDECESSOR
    """Place in the trace of the request whose end this one waits for; a closed loop."""
    delay_seconds: float = 0.0
    """After the end of the one it follows."""
    body: Mapping[str, Any] | None = None
    """The OpenAI body, where the file holds one."""

    @property
    def blocks(self) -> int:
        return len(self.chain) // HASH_BYTES


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    format: str
    """The format it was read as, or `generated`."""
    block_size_tokens: int
    requests: Sequence[TraceRequest]
    notes: Sequence[str] = field(default_factory=tuple)
    """What a reader should know: an inferred block size, malformed rows by line, an arrival grid."""

    @property
    def duration_seconds(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].arrival_seconds - self.requests[0].arrival_seconds if self.requests else 0.0


def block_name(number: int, scope: int = 0) -> PrefixHash:
    """The name of a block that a file calls by a number; numbers of different scopes have nothing in common."""
    return PrefixHash(scope.to_bytes(8, "little") + number.to_bytes(8, "little", signed=True))
