"""Prompts that a file holds as text: rendered, tokenized and named, and put into drafts turn by turn.

Without a tokenizer, four bytes of the plain rendering are a token: about what the vocabularies of today make of English
text and code, and two prompts share what they begin with, which is what matters here. Exact counts need the model's own
tokenizer (`load_renderer`).
"""

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import orjson
from tokenizers import Tokenizer

from cachecore.prompts.contract import PromptError, Rendered, Renderer
from cachecore.prompts.huggingface import HuggingFaceRenderer
from cachecore.prompts.messages import has_media
from cachecore.prompts.naming import PromptNamer
from cachecore.prompts.plain import PlainRenderer
from cachecore.scope import DEFAULT_TENANT, IdentityScope, KeyId, Keyring, Naming
from loadtest.traces.arrivals import poisson
from loadtest.traces.building import Draft, positions
from loadtest.traces.contract import TraceError
from loadtest.traces.parsing import Parsed, ReadOptions
from loadtest.traces.rows import RowError, Tally

BLOCK_SIZE_TOKENS = 16
"""What prompts are cut into when nobody says: the smallest block that engines use, so that no sharing is overlooked."""
_NAMER_BYTES_MAX = 256 << 20
_BYTES_PER_TOKEN = 4
_MEDIUM_DIGEST_BYTES = 8
# Names of traces are compared within one file and kept from nobody, so their key may be known.
_KEYRING = Keyring({0: bytes(32)}, 0)


class QuadRenderer(PlainRenderer):
    """The plain rendering, four bytes a token; a segment's last token may have fewer."""

    name = "quads"
    fingerprint = "plain-quads-1"

    def encode(self, segment: str) -> "array[int]":
        data = segment.encode("utf-8", "surrogatepass")
        token_ids = array("I")
        token_ids.frombytes(data + b"\0" * (-len(data) % _BYTES_PER_TOKEN))
        return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return array("I", token_ids).tobytes().rstrip(b"\0").decode("utf-8", "replace")


class TokenizerRenderer(PlainRenderer):
    """The plain rendering in the tokens of a tokenizer, for one that comes without a chat template."""

    name = "tokenizer"

    def __init__(self, tokenizer: Tokenizer, fingerprint: str) -> None:
        self._tokenizer = tokenizer
        self.fingerprint = fingerprint

    def encode(self, segment: str) -> "array[int]":
        return array("I", self._tokenizer.encode(segment, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


def load_renderer(path: Path) -> Renderer:
    """Of a model directory or a `tokenizer.json` in one. Raises TraceError."""
    if not path.exists():
        raise TraceError(f"{path}: there is no such file")
    directory = path if path.is_dir() else path.parent
    try:
        renderer = HuggingFaceRenderer.load(directory)
    except ValueError as error:
        raise TraceError(str(error)) from error
    try:
        renderer.chat({"messages": [{"role": "user", "content": "x"}]})
    except PromptError:
        return TokenizerRenderer(renderer.tokenizer, f"plain-{renderer.fingerprint}")
    return renderer


class TextDrafts:
    """Collects drafts of requests that are known by their text."""

    def __init__(self, options: ReadOptions) -> None:
        self.block_size_tokens = options.block_size_tokens or BLOCK_SIZE_TOKENS
        self.drafts: list[Draft] = []
        self._options = options
        self._renderer: Renderer = options.renderer or QuadRenderer()
        scope = IdentityScope("trace", KeyId(DEFAULT_TENANT, 0), self.block_size_tokens)
        self._naming = Naming.of(scope, _KEYRING)
        self._namer = PromptNamer(_NAMER_BYTES_MAX)
        self._starts: Iterator[float] = poisson(Random(options.seed), options.rate)
        self._untimed = self._unanswered = self._incomplete = self._uncached = 0

    def tokens(self, text: str) -> int:
        return len(self._renderer.encode(text))

    def add(
        self,
        body: Mapping[str, Any],
        *,
        arrival_seconds: float | None = None,
        answer: str | None = None,
        output_tokens: int | None = None,
        session: str = "",
        tenant: str = "",
        follows: Draft | None = None,
        delay_seconds: float | None = None,
    ) -> Draft:
        """A request with this OpenAI body. Without a time it comes after the one it follows, or starts a conversation.

        Raises RowError, PromptError.
        """
        named = self._named(body)
        if not named[1]:
            raise RowError("an empty prompt")
        delay = self._options.think_seconds if delay_seconds is None and arrival_seconds is None else delay_seconds
        draft = Draft(
            self._arrival(arrival_seconds, follows, delay or 0.0),
            named[1],
            self._output_tokens(body, answer, output_tokens),
            named[0],
            session,
            tenant,
            follows,
            (delay or 0.0) if follows is not None else 0.0,
            body,
        )
        self.drafts.append(draft)
        return draft

    def converse(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        session: str,
        rest: Mapping[str, Any] | None = None,
    ) -> None:
        """The requests of a conversation: one for each message of the assistant, of all before it, in a closed loop.

        `rest` is what every body says besides its messages. Raises RowError when nobody asks anything.
        """
        previous: Draft | None = None
        with self.together():
            for place in _asked(messages):
                previous = self.add(
                    {**(rest or {}), "messages": list(messages[:place])},
                    answer=said(messages[place]) if place < len(messages) else None,
                    session=session,
                    follows=previous,
                )

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is added within is added whole or, where it raises, not at all: half a conversation is none."""
        before = len(self.drafts)
        try:
            yield
        except Exception:
            del self.drafts[before:]
            raise

    def parsed(self, tally: Tally, notes: Sequence[str] = ()) -> Parsed:
        own = [f"prompts cut into blocks of {self.block_size_tokens} tokens, counted by {_counted_by(self._renderer)}"]
        if self._untimed:
            own.append(
                f"no times: {self._untimed} requests or conversations begin at {self._options.rate:g} a second "
                f"(Poisson, seed {self._options.seed})"
            )
        if self._unanswered:
            own.append(f"{self._unanswered} answers are not there: {self._options.output_tokens} tokens each, or less")
        if self._incomplete:
            own.append(f"{self._incomplete} prompts hold more than text, which counts as a few tokens each here")
        if self._uncached:
            own.append(
                f"{self._uncached} ask for their prompt's logprobs: engines read no cache for them, so none is hit"
            )
        return Parsed(self.drafts, self.block_size_tokens, [*notes, *own, *tally.notes()])

    def _arrival(self, stated: float | None, follows: Draft | None, delay_seconds: float) -> float:
        if stated is not None:
            return stated
        if follows is not None:
            return follows.arrival_seconds + delay_seconds
        self._untimed += 1
        return next(self._starts)

    def _named(self, body: Mapping[str, Any]) -> tuple[Any, int]:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and all(type(token) is int for token in prompt):
            named = self._namer.name_tokens(self._naming, prompt)
        else:
            rendered = self._rendered(body, prompt)
            named = self._namer.name(self._renderer, self._naming, rendered)
        if _reads_no_cache(body):
            self._uncached += 1
            return positions(self._uncached, named.token_count, self.block_size_tokens), named.token_count
        return named.chain, named.token_count

    def _rendered(self, body: Mapping[str, Any], prompt: Any) -> Rendered:
        if "messages" in body:
            rendered = self._renderer.chat(body)
            if not rendered.complete:
                self._incomplete += 1
                rendered = self._renderer.chat({**body, "messages": list(map(_as_text, body["messages"]))})
            return rendered
        if isinstance(prompt, str):
            return self._renderer.text(prompt)
        raise RowError("neither `messages` nor a `prompt` that is one text or one list of token ids")

    def _output_tokens(self, body: Mapping[str, Any], answer: str | None, stated: int | None) -> int:
        if stated is not None:
            return stated
        if answer is not None:
            return max(self.tokens(answer), 1)
        self._unanswered += 1
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        assumed = self._options.output_tokens
        return min(limit, assumed) if isinstance(limit, int) and limit > 0 else assumed


def _reads_no_cache(body: Mapping[str, Any]) -> bool:
    """Whether engines compute the whole prompt, whatever they hold of it: they are asked for its own logprobs."""
    echoes = bool(body.get("echo")) and body.get("logprobs") is not None and "messages" not in body
    return echoes or body.get("prompt_logprobs") is not None


def _asked(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """How many messages stand before each answer, and all where the last one waits for its. Raises RowError."""
    first = next((place for place, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise RowError("a conversation in which no user speaks")
    places = [place for place in range(first + 1, len(messages)) if messages[place]["role"] == "assistant"]
    return places if messages[-1]["role"] == "assistant" else [*places, len(messages)]


def _as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose media are replaced by what names them, so that equal ones still read equal."""
    content = message.get("content")
    if not isinstance(content, list) or not has_media([message]):
        return message
    return {**message, "content": [part if not has_media([{"content": [part]}]) else _medium(part) for part in content]}


def _medium(part: Mapping[str, Any]) -> dict[str, str]:
    digest = hashlib.blake2b(orjson.dumps(part, option=orjson.OPT_SORT_KEYS), digest_size=_MEDIUM_DIGEST_BYTES)
    return {"type": "text", "text": f"<|{part.get('type')} {digest.hexdigest()}|>"}


def said(message: Mapping[str, Any]) -> str:
    """All that a model wrote for a message: its text and the arguments of its calls."""
    content = message.get("content")
    texts = [content] if isinstance(content, str) else []
    if isinstance(content, list):
        texts += [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        texts.append(f"{function.get('name', '')}{function.get('arguments', '')}")
    return "\n".join(texts)


def _counted_by(renderer: Renderer) -> str:
    if isinstance(renderer, QuadRenderer):
        return "four bytes a token, for want of a tokenizer"
    return f"the tokenizer handed in ({renderer.name})"
