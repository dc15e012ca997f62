"""From what a parser understood of a file to a trace: names of blocks, order of arrival, who follows whom.

A file tells what prompts share in one of three ways, and a name must mean the same prompt up to its block:

* ids that hold for the whole file, or for one conversation: an id within its scope is the name (`names_of`). Where one
  id stands after two different ones, it names a text and not a prefix; then all names are chained (`chain_names`);
* lengths of a conversation's turns: each turn's prompt begins with the turn before and its answer, so the position in
  the conversation is the name;
* nothing: each prompt is its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from cachecore.blocks import EMPTY_CHAIN, HASH_BYTES, Chain
from loadtest.traces.contract import NO_PREDECESSOR, TraceRequest

_ID_LIMIT = 1 << 64


@dataclass(slots=True, eq=False)
class Draft:
    """A request as its parser left it. Times may start anywhere; `follows` is the draft it waits for."""

    arrival_seconds: float
    input_tokens: int
    output_tokens: int
    chain: Chain = EMPTY_CHAIN
    session: str = ""
    tenant: str = ""
    follows: "Draft | None" = None
    delay_seconds: float = 0.0
    body: Mapping[str, Any] | None = None
    place: int = field(default=NO_PREDECESSOR, repr=False)


def names_of(ids: Sequence[int], scope: int = 0) -> Chain:
    """Names of the blocks that a file calls by these numbers (signed or unsigned 64 bits), as `block_name` gives them.

    Raises OverflowError for larger ones and TypeError for what is no integer.
    """
    try:
        numbers = numpy.asarray(ids, dtype=numpy.int64)
    except OverflowError:
        if not all(0 <= number < _ID_LIMIT for number in ids):
            raise
        numbers = numpy.asarray(ids, dtype=numpy.uint64).view(numpy.int64)
    pairs = numpy.empty((len(numbers), 2), dtype="<i8")
    pairs[:, 0] = scope
    pairs[:, 1] = numbers
    return Chain(pairs.tobytes())


def positions(scope: int, tokens: int, block_size_tokens: int) -> Chain:
    """Names of a prompt's full blocks by their position in a conversation that is numbered `scope`."""
    return names_of(range(tokens // block_size_tokens), scope)


def by_position(drafts: Iterable[Draft], block_size_tokens: int) -> None:
    """Name blocks where a file tells lengths only: drafts of one session continue one another, others are their own."""
    scopes: dict[str, int] = {}
    for number, draft in enumerate(drafts, start=1):
        scope = scopes.setdefault(draft.session, number) if draft.session else number
        draft.chain = positions(scope, draft.input_tokens, block_size_tokens)


def assembled(drafts: Sequence[Draft]) -> list[TraceRequest]:
    """In order of arrival, from time 0 on; none before the one it follows."""
    for draft in drafts:
        if draft.follows is not None:
            draft.arrival_seconds = max(draft.arrival_seconds, draft.follows.arrival_seconds)
    ordered = sorted(drafts, key=lambda draft: draft.arrival_seconds)
    start = ordered[0].arrival_seconds if ordered else 0.0
    for place, draft in enumerate(ordered):
        draft.place = place
    return [
        TraceRequest(
            draft.arrival_seconds - start,
            draft.chain,
            draft.input_tokens,
            draft.output_tokens,
            draft.session,
            draft.tenant,
            draft.follows.place if draft.follows is not None else NO_PREDECESSOR,
            draft.delay_seconds,
            draft.body,
        )
        for draft in ordered
    ]


def ambiguous_names(drafts: Iterable[Draft]) -> int:
    """How many names stand after two different names, so that they cannot mean the prompt up to them."""
    parents: dict[bytes, bytes] = {}
    ambiguous: set[bytes] = set()
    for draft in drafts:
        chain, parent = draft.chain, b""
        for start in range(0, len(chain), HASH_BYTES):
            name = chain[start : start + HASH_BYTES]
            if parents.setdefault(name, parent) != parent:
                ambiguous.add(name)
            parent = name
    return len(ambiguous)


def chain_names(drafts: Iterable[Draft]) -> None:
    """Give each block a name that covers all blocks before it."""
    numbers: dict[tuple[int, bytes], int] = {}
    for draft in drafts:
        chain, parent, path = draft.chain, 0, []
        for start in range(0, len(chain), HASH_BYTES):
            parent = numbers.setdefault((parent, chain[start : start + HASH_BYTES]), len(numbers) + 1)
            path.append(parent)
        draft.chain = names_of(path)
