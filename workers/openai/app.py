"""OpenAI's API over any `Engine`: the routes, and the story of a completion."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from fastapi import FastAPI
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from workers.engine import Engine, TokenLogprob, TransferInfo
from workers.kv_quality import QualityJournal
from workers.openai.answers import AnswerShape, ChatShape, CompletionShape, text_of, usage
from workers.openai.choices import Choice, follow
from workers.openai.errors import ApiError, InvalidRequest
from workers.openai.fidelity import accepted_fidelity, kv_headers
from workers.openai.leaving import Door, Presence, PresenceCollector
from workers.openai.metrics import registry_of
from workers.openai.pools import PoolCollector, PoolDesk, mount_pools
from workers.openai.quality import QualityCollector, mount_quality
from workers.openai.requests import Caller, Served, body_of, chat_choices, chat_prompt, completion_choices, encoded
from workers.openai.responses import (
    JsonResponse,
    RequestIds,
    error_response,
    event,
    request_id_of,
    streamed,
    whole,
)
from workers.openai.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    checked,
    read_document,
)
from workers.publisher import EventPublisher

Handler = Callable[[Request], Any]


def build_app(
    engine: Engine,
    *,
    kind: str = "ropeway-reference",
    publisher: EventPublisher | None = None,
    adapters: Sequence[str] = (),
    output_tokens_default: int | None = None,
    pools: PoolDesk | None = None,
    quality: QualityJournal | None = None,
    presence: Presence | None = None,
) -> FastAPI:
    """The worker's whole HTTP surface. Its lifespan starts and stops the engine.

    `kind` names the engine on `/server_info`; `adapters` are further model names that the engine takes as LoRA
    adapters; `output_tokens_default` is the output length of requests that name none (None: OpenAI's defaults);
    `pools` are those that the engine has open; `quality` is what checking its answers has shown; `presence` is whether
    it takes requests, where its server says so.
    """
    presence = presence or Presence()
    served = Served(engine, kind, tuple(adapters), output_tokens_default)
    app = FastAPI(title="Ropeway worker", lifespan=_lifespan_of(engine), openapi_url=None)
    app.add_middleware(Door, presence=presence)
    app.add_middleware(RequestIds)
    for status_or_type in (ApiError, HTTPException, Exception):
        app.add_exception_handler(status_or_type, _on_exception)
    _Completions(served).mount(app)
    _Tokens(served).mount(app)
    collectors: list[Collector] = [PresenceCollector(presence)]
    if quality is not None:
        collectors.append(QualityCollector(quality))
    _Administration(served, publisher, pools, collectors, presence).mount(app)
    if pools is not None:
        mount_pools(app, pools)
    if quality is not None:
        mount_quality(app, quality)
    return app


def _lifespan_of(engine: Engine) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        try:
            yield
        finally:
            await engine.stop()

    return lifespan


def _on_exception(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        missing = error.status_code == 404
        error = ApiError(error.status_code, f"there is no {request.url.path} here" if missing else str(error.detail))
    return error_response(error)


def _guarded(handler: Handler) -> Handler:
    """Errors become answers here rather than in the framework, which would log a client's mistake as ours."""

    async def guarded(request: Request) -> Response:
        try:
            response: Response = await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            return error_response(error)
        return response

    return guarded


class _Completions:
    """`/v1/chat/completions` and `/v1/completions`."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._engine = served.engine

    def mount(self, app: FastAPI) -> None:
        app.add_route("/v1/chat/completions", _guarded(self.chat), methods=["POST"])
        app.add_route("/v1/completions", _guarded(self.completion), methods=["POST"])

    async def chat(self, http: Request) -> Response:
        document = read_document(await body_of(http))
        request = checked(document, ChatRequest)
        request.check()
        request_id = request_id_of(http)
        choices = chat_choices(self._served, request, document, Caller(request_id, accepted_fidelity(http)))
        model = request.model or self._engine.info.model
        return self._answer(request, choices, ChatShape(self._engine.renderer, f"chatcmpl-{request_id}", model))

    async def completion(self, http: Request) -> Response:
        request = checked(read_document(await body_of(http)), CompletionRequest)
        request.check()
        request_id = request_id_of(http)
        choices = completion_choices(self._served, request, Caller(request_id, accepted_fidelity(http)))
        model = request.model or self._engine.info.model
        shape = CompletionShape(
            self._engine.renderer,
            f"cmpl-{request_id}",
            model,
            echo=bool(request.echo),
            silent=request.max_tokens == 0,
        )
        return self._answer(request, choices, shape)

    def _answer(self, request: GenerationRequest, choices: Sequence[Choice], shape: AnswerShape) -> Response:
        if request.stream:
            return streamed(self._events(choices, shape, request.includes_usage), lambda: kv_headers(choices))
        return whole(lambda: self._document(choices, shape), lambda: kv_headers(choices))

    async def _document(self, choices: Sequence[Choice], shape: AnswerShape) -> dict[str, Any]:
        texts: dict[int, list[str]] = {choice.index: [] for choice in choices}
        logprobs: dict[int, list[TokenLogprob]] = {choice.index: [] for choice in choices}
        async with aclosing(follow(self._engine, choices)) as gains:
            async for choice, delta in gains:
                texts[choice.index].append(delta.text)
                logprobs[choice.index] += delta.logprobs
        finished = [shape.whole(choice, "".join(texts[choice.index]), logprobs[choice.index]) for choice in choices]
        return {**shape.envelope(finished, streaming=False), "usage": usage(choices)}

    async def _events(
        self, choices: Sequence[Choice], shape: AnswerShape, includes_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        no_usage = {"usage": None} if includes_usage else {}

        def chunk(document: dict[str, Any]) -> bytes:
            return event({**shape.envelope([document], streaming=True), **no_usage})

        opened: set[int] = set()
        async with aclosing(follow(self._engine, choices)) as gains:
            async for choice, delta in gains:
                if choice.index not in opened:
                    opened.add(choice.index)
                    opening = shape.opening(choice)
                    if opening is not None:
                        yield chunk(opening)
                part = shape.chunk(choice, delta)
                if part is not None:
                    yield chunk(part)
                if choice.finish_reason is not None:
                    yield chunk(shape.closing(choice))
        if includes_usage:
            yield event({**shape.envelope([], streaming=True), "usage": usage(choices)})


class _Tokens:
    """`/tokenize` and `/detokenize`, as vLLM answers them."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._engine = served.engine

    def mount(self, app: FastAPI) -> None:
        app.add_route("/tokenize", _guarded(self.tokenize), methods=["POST"])
        app.add_route("/detokenize", _guarded(self.detokenize), methods=["POST"])

    async def tokenize(self, http: Request) -> Response:
        document = read_document(await body_of(http))
        request = checked(document, TokenizeRequest)
        self._served.adapter_of(request.model)
        tokens = self._token_ids(request, document)
        answer = {
            "count": len(tokens),
            "max_model_len": self._engine.info.max_model_len,
            "tokens": tokens,
            "token_strs": None,
        }
        if request.return_token_strs:
            answer["token_strs"] = [text_of(self._engine.renderer, (token_id,)) for token_id in tokens]
        return JsonResponse(answer)

    async def detokenize(self, http: Request) -> Response:
        request = checked(read_document(await body_of(http)), DetokenizeRequest)
        self._served.adapter_of(request.model)
        try:
            return JsonResponse({"prompt": self._engine.renderer.decode(request.tokens)})
        except (ValueError, OverflowError, TypeError) as error:
            raise InvalidRequest(f"tokens cannot be decoded: {error}", param="tokens") from error

    def _token_ids(self, request: TokenizeRequest, document: dict[str, Any]) -> list[int]:
        renderer = self._engine.renderer
        if request.messages is not None:
            return chat_prompt(renderer, document).token_ids.tolist()
        if request.prompt is None:
            raise InvalidRequest("either prompt or messages must be given", param="prompt")
        if request.add_special_tokens is False:
            return renderer.encode(request.prompt).tolist()
        return encoded(renderer, renderer.text(request.prompt)).tolist()


class _Administration:
    """What the worker says of itself, and the one thing it can be told."""

    def __init__(
        self,
        served: Served,
        publisher: EventPublisher | None,
        pools: PoolDesk | None,
        collectors: Sequence[Collector],
        presence: Presence,
    ) -> None:
        self._served = served
        self._engine = served.engine
        self._publisher = publisher
        self._presence = presence
        self._created = int(time.time())
        self._pools = pools
        self._registry = registry_of(served.engine)
        if pools is not None:
            self._registry.register(PoolCollector(pools))
        for collector in collectors:
            self._registry.register(collector)

    def mount(self, app: FastAPI) -> None:
        app.add_route("/v1/models", _guarded(self.models), methods=["GET"])
        app.add_route("/health", _guarded(self.health), methods=["GET"])
        app.add_route("/metrics", _guarded(self.metrics), methods=["GET"])
        app.add_route("/server_info", _guarded(self.server_info), methods=["GET"])
        app.add_route("/reset_prefix_cache", _guarded(self.reset_prefix_cache), methods=["POST"])
        app.add_route("/cached_blocks", _guarded(self.cached_blocks), methods=["GET"])

    async def models(self, _http: Request) -> Response:
        info = self._engine.info
        names = [(info.model, None), *((adapter, info.model) for adapter in self._served.adapters)]
        return JsonResponse({"object": "list", "data": [self._model(name, parent) for name, parent in names]})

    def _model(self, name: str, parent: str | None) -> dict[str, Any]:
        info = self._engine.info
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "ropeway",
            "root": info.root or info.model,
            "parent": parent,
            "max_model_len": info.max_model_len,
        }

    async def health(self, _http: Request) -> Response:
        self._presence.health_asked()
        if self._presence.leaving:
            return JsonResponse({"status": "draining"}, 503)
        return Response()

    async def metrics(self, _http: Request) -> Response:
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    async def server_info(self, _http: Request) -> Response:
        info = self._engine.info
        publisher = self._publisher
        return JsonResponse(
            {
                "engine": self._served.kind,
                "model": info.model,
                "revision": info.revision,
                "epoch": info.epoch,
                "block_size": info.block_size_tokens,
                "blocks_total": info.blocks_total,
                "max_model_len": info.max_model_len,
                "max_num_seqs": info.sequences_max,
                "dtype": info.dtype,
                "tokenizer_fingerprint": self._engine.renderer.fingerprint,
                "kv_events": None if publisher is None else publisher.describe(info.block_size_tokens),
                **({} if info.transfer is None else {"transfer": self._transfer(info.transfer)}),
            }
        )

    def _transfer(self, info: TransferInfo) -> dict[str, Any]:
        """With the pools as they are now: one that was away, or was wiped, has got another generation."""
        return info.document() if self._pools is None else {**info.document(), "pools": self._pools.describe()}

    async def reset_prefix_cache(self, _http: Request) -> Response:
        await self._engine.reset_prefix_cache()
        return Response()

    async def cached_blocks(self, _http: Request) -> Response:
        """What `ropeway index check` holds the index against: `[handle, copies]` of each block that can be hit."""
        blocks = await self._engine.cached_blocks()
        return JsonResponse({"epoch": self._engine.info.epoch, "blocks": list(blocks.items())})
