"""From an OpenAI request to the very token ids the engine will compute.

Naming KV begins here: a prompt is named right only when it is rendered and tokenized exactly as the engine does it. The
room is shared by the gateway, the workers that render by themselves and the audit, so it knows no HTTP.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from cachecore.blocks import Chain


class PromptError(ValueError):
    """The request cannot be rendered: empty or malformed `messages`, a template that refuses. The client sees why."""


class Rendered(NamedTuple):
    """A prompt as text, cut where tokenization cannot reach across.

    `segments` tokenize independently of each other: the tokens of the prompt are the tokens of the segments, joined.
    """

    segments: Sequence[str]
    complete: bool = True
    """False when the prompt goes on with something that has no name here (an image): only its beginning is given."""


class NamedPrompt(NamedTuple):
    """A prompt with its token count and the PrefixHashes of its full blocks."""

    token_count: int
    chain: Chain
    complete: bool = True


class Renderer(Protocol):
    """Renders and tokenizes for one model, as its engine does."""

    name: str
    """What it is, for receipts and `/status`: `template`, `plain`, `remote`."""
    fingerprint: str
    """Digest of tokenizer and template; equal fingerprints render equally."""

    def chat(self, request: Mapping[str, Any]) -> Rendered:
        """Render the body of a chat completion request. Raises PromptError."""
        ...

    def text(self, prompt: str) -> Rendered:
        """A plain prompt of `/v1/completions` (special tokens added as the tokenizer is configured to)."""
        ...

    def encode(self, segment: str) -> "array[int]":
        """Token ids (typecode 'I') of one segment."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of tokens; what is not yet a whole character reads U+FFFD. Raises ValueError for an unknown id."""
        ...
