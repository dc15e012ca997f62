"""From a checked request to choices ready to run: the prompt tokens, the sampling, the context's bounds."""

import itertools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from cachecore.prompts.contract import Rendered, Renderer
from cachecore.scope import Fidelity
from workers.engine import Engine, Generation, Sampling
from workers.openai.choices import Choice, Prompt
from workers.openai.errors import BodyTooLarge, ContextExceeded, InvalidRequest, UnknownModel
from workers.openai.schema import ChatRequest, CompletionRequest, GenerationRequest, token_array

COMPLETION_TOKENS_DEFAULT = 16
"""OpenAI's default for `/v1/completions`; a chat may fill the context."""
BODY_BYTES_MAX = 64 * 1024 * 1024
"""What a gateway lets through unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class Served:
    """What an app serves: an engine under its names."""

    engine: Engine
    kind: str
    adapters: Sequence[str] = ()
    output_tokens_default: int | None = None
    """Output length of a request that names none; None for OpenAI's defaults."""
    serial: "itertools.count[int]" = field(default_factory=itertools.count)

    def adapter_of(self, model: str | None) -> str:
        """The adapter that a model name asks for, "" for the base model. Raises UnknownModel."""
        if not model or model == self.engine.info.model:
            return ""
        if model in self.adapters:
            return model
        raise UnknownModel(model)


@dataclass(frozen=True, slots=True)
class Caller:
    """What a request says beside its body."""

    request_id: str
    fidelity: Fidelity = Fidelity.EXACT


async def body_of(http: Request) -> bytes:
    """All of a request's body. Raises BodyTooLarge as soon as it is known to be, and ClientDisconnect."""
    stated = http.headers.get("content-length", "")
    if stated.isdecimal() and int(stated) > BODY_BYTES_MAX:
        raise BodyTooLarge(BODY_BYTES_MAX)
    body = bytearray()
    async for piece in http.stream():
        body += piece
        if len(body) > BODY_BYTES_MAX:
            raise BodyTooLarge(BODY_BYTES_MAX)
    return bytes(body)


def encoded(renderer: Renderer, rendered: Rendered) -> "array[int]":
    tokens = array("I")
    for segment in rendered.segments:
        tokens += renderer.encode(segment)
    return tokens


def chat_prompt(renderer: Renderer, document: Mapping[str, Any]) -> Prompt:
    return Prompt(encoded(renderer, renderer.chat(document)))


def completion_prompts(renderer: Renderer, request: CompletionRequest) -> list[Prompt]:
    return [
        Prompt(encoded(renderer, renderer.text(given)), given) if isinstance(given, str) else Prompt(given)
        for given in request.prompts()
    ]


def chat_choices(served: Served, request: ChatRequest, document: Mapping[str, Any], caller: Caller) -> list[Choice]:
    """Raises ApiError or PromptError."""
    prompt = chat_prompt(served.engine.renderer, document)
    allowed = request.max_completion_tokens or request.max_tokens
    if allowed is None:
        allowed = served.output_tokens_default
    sampling = _sampling(served, request, prompt, allowed, None, request.logprobs_count)
    return _choices(served, request, [(prompt, sampling)], caller)


def completion_choices(served: Served, request: CompletionRequest, caller: Caller) -> list[Choice]:
    """Raises ApiError."""
    default = served.output_tokens_default or COMPLETION_TOKENS_DEFAULT
    # Nothing but the prompt's logprobs is asked for where max_tokens is 0: engines produce a token all the same.
    allowed = None if request.max_tokens is None else max(request.max_tokens, 1)
    prompt_logprobs = request.prompt_logprobs
    if request.echo and request.logprobs is not None and prompt_logprobs is None:
        prompt_logprobs = request.logprobs
    jobs = [
        (prompt, _sampling(served, request, prompt, allowed or default, prompt_logprobs, request.logprobs))
        for prompt in completion_prompts(served.engine.renderer, request)
    ]
    return _choices(served, request, jobs, caller)


def _choices(
    served: Served, request: GenerationRequest, jobs: Sequence[tuple[Prompt, Sampling]], caller: Caller
) -> list[Choice]:
    adapter = served.adapter_of(request.model)
    serial = next(served.serial)
    choices: list[Choice] = []
    for prompt, sampling in jobs:
        for branch in range(request.n or 1):
            index = len(choices)
            generation = Generation(
                request_id=f"{caller.request_id}-{serial}-{index}",
                token_ids=prompt.token_ids,
                sampling=_branch(sampling, branch),
                cache_salt=request.cache_salt or "",
                adapter=adapter,
                priority=request.priority or 0,
                kv_transfer_params=request.kv_transfer_params,
                fidelity=caller.fidelity,
            )
            choices.append(Choice(index, prompt, generation, served.engine, request.stops))
    return choices


def _branch(sampling: Sampling, branch: int) -> Sampling:
    """Equal seeds would draw n equal choices."""
    if sampling.seed is None or branch == 0:
        return sampling
    fields = {name: getattr(sampling, name) for name in Sampling.__slots__}
    return Sampling(**{**fields, "seed": sampling.seed + branch})


def _sampling(
    served: Served,
    request: GenerationRequest,
    prompt: Prompt,
    allowed: int | None,
    prompt_logprobs: int | None,
    logprobs: int | None,
) -> Sampling:
    return Sampling(
        max_tokens=_output_tokens(served, request, len(prompt.token_ids), allowed),
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(request.top_k or 0, 0),
        min_p=request.min_p or 0.0,
        seed=request.seed,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs if prompt_logprobs is None else prompt_logprobs,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(token_array(request.stop_token_ids, "stop_token_ids") if request.stop_token_ids else ()),
    )


def _output_tokens(served: Served, request: GenerationRequest, prompt_tokens: int, allowed: int | None) -> int:
    """How much may be generated. A length the client asked for must fit; a default shrinks to what does."""
    context = served.engine.info.max_model_len
    if prompt_tokens == 0:
        raise InvalidRequest("the prompt is empty")
    room = context - prompt_tokens
    asked = request.max_completion_tokens or request.max_tokens
    if room < 1 or (asked or 0) > room:
        raise ContextExceeded(context, prompt_tokens, asked or 1)
    return room if allowed is None else min(allowed, room)
