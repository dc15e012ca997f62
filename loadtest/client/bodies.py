"""Requests of a trace as bytes for an OpenAI server.

Where the trace holds a body it is sent, as a stream that reports its usage. Where it holds lengths and block names, the
prompt is token ids made from the names: equal names give equal tokens, so the server finds the same prefixes that the
trace had, and prompts are as long as they were, token for token, whatever its tokenizer.
"""

import hashlib
from array import array
from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import orjson

from cachecore.blocks import split_chain
from loadtest.commands import UsageError
from loadtest.traces.contract import TraceRequest

TOKEN_ID_MIN = 256
"""Below are bytes and special tokens of most vocabularies."""
VOCABULARY_MAX = 65_536
_BLOCKS_CACHED = 16_384


class Wanted(NamedTuple):
    """How requests are to be asked."""

    model: str
    block_size_tokens: int
    vocabulary: int = 32_000
    """Token ids are below it."""
    streaming: bool = True
    salt: str = ""
    """Another one gives other tokens in the same places: a server that has seen the trace knows none of them."""

    def checked(self) -> "Wanted":
        """Raises UsageError for a vocabulary that leaves nothing to choose from."""
        if not TOKEN_ID_MIN < self.vocabulary <= VOCABULARY_MAX:
            raise UsageError(f"a vocabulary of {TOKEN_ID_MIN + 1} to {VOCABULARY_MAX} token ids is needed")
        return self


class Posted(NamedTuple):
    path: str
    body: bytes


def posted(request: TraceRequest, number: int, wanted: Wanted) -> Posted:
    """The request at this place of a trace as it is sent."""
    if request.body is None:
        prompt = [*token_ids(request, number, wanted)]
        fields: dict[str, Any] = {"prompt": prompt, "max_tokens": request.output_tokens, "ignore_eos": True}
    else:
        fields = {**request.body, "max_tokens": request.output_tokens}
        fields.pop("max_completion_tokens", None)
        fields.pop("stream_options", None)
    fields |= {"model": wanted.model, "stream": wanted.streaming}
    if wanted.streaming:
        fields["stream_options"] = {"include_usage": True}
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    return Posted(path, orjson.dumps(fields))


def token_ids(request: TraceRequest, number: int, wanted: Wanted) -> "array[int]":
    """`input_tokens` token ids. Blocks that the trace does not name are the request's own."""
    found: array[int] = array("H")
    for name in _names(request, number):
        if len(found) >= request.input_tokens:
            break
        found += _block(wanted.salt.encode() + name, wanted.block_size_tokens, wanted.vocabulary)
    return found[: request.input_tokens]


def _names(request: TraceRequest, number: int) -> Iterator[bytes]:
    yield from split_chain(request.chain)
    for place in count():
        yield b"%d, %d" % (number, place)


@lru_cache(maxsize=_BLOCKS_CACHED)
def _block(name: bytes, size_tokens: int, vocabulary: int) -> "array[int]":
    drawn = array("H", hashlib.shake_128(name).digest(2 * size_tokens))
    span = vocabulary - TOKEN_ID_MIN
    return array("H", [TOKEN_ID_MIN + number % span for number in drawn])
