"""The shapes of answers: chat and text completions, whole and in chunks."""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from cachecore.prompts.contract import Renderer
from workers.engine import TokenLogprob
from workers.openai.choices import Choice, Delta

Document = dict[str, Any]

_UNREADABLE = "\ufffd"


class AnswerShape(Protocol):
    """How one kind of completion is written."""

    def opening(self, choice: Choice) -> Document | None:
        """The first chunk of a choice, written when its first token has come."""
        ...

    def chunk(self, choice: Choice, delta: Delta) -> Document | None:
        """What a step brought, without its finish reason; None when there is nothing to show yet."""
        ...

    def closing(self, choice: Choice) -> Document:
        """The chunk with the finish reason."""
        ...

    def whole(self, choice: Choice, text: str, logprobs: Sequence[TokenLogprob]) -> Document:
        """A choice of an answer that is not streamed."""
        ...

    def envelope(self, choices: Sequence[Document], *, streaming: bool) -> Document: ...


class _Shape:
    """What both kinds share: the head of every document, and names for tokens."""

    kind = ""
    chunk_kind = ""

    def __init__(self, renderer: Renderer, identifier: str, model: str) -> None:
        self._renderer = renderer
        self._head: Document = {"id": identifier, "object": "", "created": int(time.time()), "model": model}

    def envelope(self, choices: Sequence[Document], *, streaming: bool) -> Document:
        return {**self._head, "object": self.chunk_kind if streaming else self.kind, "choices": choices}

    def _name(self, token_id: int) -> str:
        return text_of(self._renderer, (token_id,))

    def _prompt_logprobs(self, choice: Choice) -> list[Document | None] | None:
        """vLLM's form: for each prompt token its candidates by id, None for the first."""
        if choice.prompt_logprobs is None or choice.generation.sampling.prompt_logprobs is None:
            return None
        return [None if item is None else self._ranked(item) for item in choice.prompt_logprobs]

    def _ranked(self, item: TokenLogprob) -> Document:
        ranks = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(item.top, start=1)}
        ranked = ranks if item.token_id in ranks else {item.token_id: (item.logprob, None), **ranks}
        return {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": self._name(token_id)}
            for token_id, (logprob, rank) in ranked.items()
        }


class ChatShape(_Shape):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self, choice: Choice) -> Document | None:
        return _chat_chunk(choice, {"role": "assistant", "content": ""})

    def chunk(self, choice: Choice, delta: Delta) -> Document | None:
        if not delta.text and not delta.logprobs:
            return None
        return _chat_chunk(choice, {"content": delta.text}, self._logprobs(delta.logprobs))

    def closing(self, choice: Choice) -> Document:
        return {**_chat_chunk(choice, {}), **_ending(choice)}

    def whole(self, choice: Choice, text: str, logprobs: Sequence[TokenLogprob]) -> Document:
        document = {
            "index": choice.index,
            "message": {"role": "assistant", "content": text},
            "logprobs": self._logprobs(logprobs),
            **_ending(choice),
        }
        asked = self._prompt_logprobs(choice)
        return document if asked is None else {**document, "prompt_logprobs": asked}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Document | None:
        if not logprobs:
            return None
        return {"content": [self._entry(item) for item in logprobs]}

    def _entry(self, item: TokenLogprob) -> Document:
        alternatives = [self._scored(token_id, logprob) for token_id, logprob in item.top]
        return {**self._scored(item.token_id, item.logprob), "top_logprobs": alternatives}

    def _scored(self, token_id: int, logprob: float) -> Document:
        text = self._name(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "surrogatepass"))}


class CompletionShape(_Shape):
    """`echo` gives the prompt back; with `silent` (max_tokens 0) nothing but the prompt."""

    kind = chunk_kind = "text_completion"

    def __init__(self, renderer: Renderer, identifier: str, model: str, *, echo: bool, silent: bool) -> None:
        super().__init__(renderer, identifier, model)
        self._echo = echo
        self._silent = silent
        self._offsets: dict[int, int] = {}
        """By choice: characters of the tokens reported so far."""

    def opening(self, choice: Choice) -> Document | None:
        if not self._echo:
            return None
        return self._part(choice, self._prompt_text(choice), self._prompt_tokens(choice))

    def chunk(self, choice: Choice, delta: Delta) -> Document | None:
        if self._silent or not (delta.text or delta.logprobs):
            return None
        return self._part(choice, delta.text, delta.logprobs)

    def closing(self, choice: Choice) -> Document:
        return {**self._part(choice, "", ()), **_ending(choice)}

    def whole(self, choice: Choice, text: str, logprobs: Sequence[TokenLogprob]) -> Document:
        generated = ("", ()) if self._silent else (text, logprobs)
        prompt = (self._prompt_text(choice), self._prompt_tokens(choice)) if self._echo else ("", ())
        document = {**self._part(choice, prompt[0] + generated[0], [*prompt[1], *generated[1]]), **_ending(choice)}
        asked = self._prompt_logprobs(choice)
        return document if asked is None else {**document, "prompt_logprobs": asked}

    def _part(self, choice: Choice, text: str, tokens: Sequence["TokenLogprob | int"]) -> Document:
        scores = self._logprobs(choice, tokens) if tokens else None
        return {"index": choice.index, "text": text, "logprobs": scores, "finish_reason": None}

    def _prompt_text(self, choice: Choice) -> str:
        prompt = choice.prompt
        return prompt.text if prompt.text is not None else text_of(self._renderer, prompt.token_ids)

    def _prompt_tokens(self, choice: Choice) -> "Sequence[TokenLogprob | int]":
        """The prompt's scored tokens; the first one, which nothing predicts, as a bare id."""
        if choice.generation.sampling.logprobs is None or choice.prompt_logprobs is None:
            return ()
        scored = zip(choice.prompt_logprobs, choice.prompt.token_ids, strict=True)
        return [token_id if item is None else item for item, token_id in scored]

    def _logprobs(self, choice: Choice, tokens: "Iterable[TokenLogprob | int]") -> Document:
        document: Document = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        offset = self._offsets.get(choice.index, 0)
        for item in tokens:
            scored = item if isinstance(item, TokenLogprob) else None
            name = self._name(item.token_id if isinstance(item, TokenLogprob) else item)
            document["text_offset"].append(offset)
            document["tokens"].append(name)
            document["token_logprobs"].append(scored and scored.logprob)
            document["top_logprobs"].append(scored and self._candidates(scored))
            offset += len(name)
        self._offsets[choice.index] = offset
        return document

    def _candidates(self, item: TokenLogprob) -> Document:
        return {self._name(token_id): logprob for token_id, logprob in (*item.top, (item.token_id, item.logprob))}


def usage(choices: Sequence[Choice]) -> Document:
    """Every prompt counts once, however many choices it has."""
    prompts = {id(choice.prompt): choice for choice in reversed(choices)}.values()
    prompt_tokens = sum(len(choice.prompt.token_ids) for choice in prompts)
    output_tokens = sum(choice.output_tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in prompts)},
    }


def text_of(renderer: Renderer, token_ids: Sequence[int]) -> str:
    """Text of tokens that a client chose, which may be none of the tokenizer's."""
    try:
        return renderer.decode(token_ids)
    except (ValueError, OverflowError):
        return _UNREADABLE * len(token_ids)


def _chat_chunk(choice: Choice, delta: Document, logprobs: Document | None = None) -> Document:
    return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _ending(choice: Choice) -> Document:
    return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
