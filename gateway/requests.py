"""A request as the gateway understands it: what it asks for, on whose behalf, and what must change on its way."""

import itertools
import os
import re
from collections.abc import Container, Mapping
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeVar

import orjson

from cachecore.scope import PUBLIC, Fidelity
from gateway.edge.body import Body, BodyMemory
from gateway.edge.http1 import HOP_BY_HOP, RequestHead
from gateway.edge.server import Inbound
from gateway.errors import BadRequest, Forbidden
from gateway.tenants import Tenant

SESSION_CHARACTERS_MAX = 256
FIDELITY_HEADER = b"x-ropeway-fidelity"
NAMESPACE_HEADER = b"x-ropeway-namespace"
"""Says `public` where a request shares KV with all tenants."""
TTFT_BUDGET_HEADER = b"x-ropeway-ttft-budget-ms"
TIMEOUT_HEADER = b"x-ropeway-timeout-ms"
MILLISECONDS_MAX = 3_600_000
"""That a header may state."""

# Not sent upstream: what belongs to this connection, what the gateway sets itself, and what is meant for it alone.
# Answers come uncompressed, so that usage can be read off them.
NOT_FORWARDED = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"accept-encoding",
    b"x-request-id",
    FIDELITY_HEADER,
    NAMESPACE_HEADER,
    b"x-ropeway-policy",
    b"x-ropeway-session",
    TTFT_BUDGET_HEADER,
    TIMEOUT_HEADER,
}

KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})
"""Which hold a client's key, of OpenAI's clients and of Anthropic's."""

FIDELITIES = {fidelity.name.lower().encode(): fidelity for fidelity in Fidelity}
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}").fullmatch
_MULTIPART_MODEL = re.compile(rb'[; ]name="?model"?\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,512})\r\n')

# Ids need only be unique: a number behind what this process drew once.
_PROCESS_ID = os.urandom(4).hex()
_OWN_ID = f"req-{_PROCESS_ID}"
_numbers = itertools.count(1)

_OPTION_KEYS = frozenset(
    {
        "cache_salt",
        "priority",
        "max_completion_tokens",
        "max_tokens",
        "user",
        "echo",
        "logprobs",
        "prompt_logprobs",
        "truncate_prompt_tokens",
        "add_special_tokens",
    }
)
_READ_KEYS = _OPTION_KEYS | {"model", "stream"}
_SPLICED_KEYS = frozenset({"cache_salt", "kv_transfer_params", "request_id"})
_LENGTH_KEYS = frozenset({"max_tokens", "max_completion_tokens"})
_ANSWER_KEYS = frozenset(
    {
        "stream",
        "stream_options",
        "n",
        "best_of",
        "use_beam_search",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "echo",
        "logprobs",
        "top_logprobs",
        "kv_transfer_params",
    }
)
"""What shapes an answer and nothing else."""
_NO_VALUES: Mapping[str, Any] = {}
_KIND_NAMES: Mapping[type, str] = {str: "string", bool: "boolean"}
Value = TypeVar("Value", str, bool)

# Routes under /v1/ that change a worker rather than ask it something; `/v1/models` the gateway answers itself.
_NOT_PASSED_ON = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/models"})


class Kind(Enum):
    """What a route carries, as far as naming its prompt goes."""

    CHAT = "chat"
    COMPLETION = "completion"
    MESSAGES = "messages"
    """Anthropic's: a chat in another form."""
    RESPONSES = "responses"
    """As well."""
    EMBEDDING = "embedding"
    SCORING = "scoring"
    """Texts beside a query: how an engine joins them is its own affair."""
    TOKENS = "tokens"
    """Asks for token ids, or how many there are: nothing is computed."""
    OTHER = "other"
    """Passed to a worker that serves the model, its prompt unread."""

    @staticmethod
    def of(method: str, path: str) -> "Kind | None":
        """The kind of a hot route; None for everything that is not inference."""
        if method == "POST" and path in _NAMED:
            return _NAMED[path]
        if not path.startswith("/v1/") or path in _NOT_PASSED_ON or path.startswith("/v1/models/") or path in _NAMED:
            return None
        if "/." in path and not {".", ".."}.isdisjoint(path.split("/")):
            # Whoever resolves it would arrive elsewhere.
            return None
        return Kind.OTHER if method in ("POST", "GET", "DELETE") else None


# Members of enumerations are looked up by a slow path.
_CHAT, _COMPLETION, _OTHER = Kind.CHAT, Kind.COMPLETION, Kind.OTHER
_NAMED = {
    "/v1/chat/completions": Kind.CHAT,
    "/v1/completions": Kind.COMPLETION,
    "/v1/messages": Kind.MESSAGES,
    "/v1/messages/count_tokens": Kind.TOKENS,
    "/v1/responses": Kind.RESPONSES,
    "/v1/embeddings": Kind.EMBEDDING,
    "/v1/rerank": Kind.SCORING,
    "/v2/rerank": Kind.SCORING,
    "/rerank": Kind.SCORING,
    "/v1/score": Kind.SCORING,
    "/score": Kind.SCORING,
    "/tokenize": Kind.TOKENS,
    "/detokenize": Kind.TOKENS,
}
POSTED_PATHS: tuple[str, ...] = tuple(_NAMED)
"""Which nothing but POST is for."""
_CHATS = (Kind.CHAT, Kind.MESSAGES, Kind.RESPONSES)
_NAMES_ITS_MODEL = (Kind.CHAT, Kind.COMPLETION, Kind.MESSAGES)


CHAT_KEYS = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "chat_template",
        "reasoning_effort",
    }
)
"""What a chat template can see of a request."""

_KEYS_OF = {
    Kind.CHAT: _READ_KEYS | CHAT_KEYS,
    Kind.COMPLETION: _READ_KEYS | {"prompt"},
    Kind.MESSAGES: _READ_KEYS | CHAT_KEYS | {"system", "metadata", "output_config", "thinking", "tool_choice"},
    Kind.RESPONSES: _READ_KEYS
    | CHAT_KEYS
    | {"input", "instructions", "max_output_tokens", "previous_response_id", "prompt_cache_key", "reasoning"},
    Kind.EMBEDDING: _READ_KEYS | CHAT_KEYS | {"input"},
    Kind.SCORING: _READ_KEYS | {"query", "documents", "text_1", "text_2", "queries", "items"},
}
"""What is read of a body whose prompt is."""


class ServedModels(Protocol):
    """Which models there are, for requests that do not say which they mean."""

    def only_model(self) -> str:
        """The one model served. Raises ServiceError when there are none or several."""
        ...


class Request:
    """A request as it is understood."""

    model: str

    def __init__(
        self,
        request_id: str,
        upstream_id: str,
        kind: Kind,
        inbound: Inbound,
        body: Body | None,
        tenant: Tenant,
    ) -> None:
        self.id = request_id
        """The client's own id, or ours; on every answer."""
        self.upstream_id = upstream_id
        """Unique among live requests: engines keep state under it."""
        self.kind = kind
        self.head, self.path, self.data, self.client = inbound.head, inbound.path, inbound.body, inbound.client
        self.body = body
        """None for bodies that are not JSON objects."""
        self.tenant = tenant
        self.namespace = tenant.id
        """Whose key names its blocks: the tenant's, or that of all where it said so."""
        # What it does not say. Set here: what is read off a class takes ten times as long.
        self.adapter = self.session = self.policy = self.client_salt = ""
        self.priority = self.output_tokens_max = 0
        self.states_priority = self.streams = False
        self.prompts_count = 1
        self.reshaped = False
        """The engine is asked to compute another prompt than its text says (truncated, or surrounded otherwise)."""
        self.timeout_seconds: float | None = None
        """What its whole answer may take, from its arrival on; None when it does not say."""
        self.time_over_at: float | None = None
        """When that is over, or what it is given altogether, by the clock of whoever serves it."""
        self.ttft_budget_seconds: float | None = None
        """What its first token may take, from its arrival on; None when it does not say."""
        self.deadline: float | None = None
        """When that is over, by the clock of whoever serves it."""
        self.fidelity: Fidelity | None = None
        """The worst KV that it accepts; None when it does not say."""
        self.skips_cache = False
        """Engines do not read their prefix cache for it (prompt logprobs are asked for)."""
        self.salt_json: bytes | None = None
        """The salt that its prompt was named with."""
        self.values: Mapping[str, Any] = _NO_VALUES
        """What the body says under the keys that are read here, perhaps among others."""

    @property
    def foreign(self) -> bool:
        """Whether its body is of another form than OpenAI's two, where few of the keys that those take mean a thing."""
        return self.kind is not _CHAT and self.kind is not _COMPLETION

    def question(self) -> dict[str, Any] | None:
        """What an engine would have to tokenize to see its prompt; None where there is no such question."""
        values = self.values
        if self.reshaped or self.prompts_count != 1 or self.kind is _OTHER:
            return None
        if self.kind is _CHAT or (self.kind in _CHATS and "messages" in values):
            return {"model": self.model, **{key: values[key] for key in CHAT_KEYS if key in values}}
        prompt = values.get("prompt")
        return {"model": self.model, "prompt": prompt} if isinstance(prompt, str) else None

    def upstream_body(
        self,
        salt_json: bytes | None,
        forward_kv_transfer_params: bool,
        plans: bytes | None = None,
        further: Mapping[str, bytes | None] | None = None,
    ) -> list[bytes]:
        """The body to send, in parts: as received but for the keys the gateway owns. `plans`: the JSON to put in the
        place of the client's own `kv_transfer_params`; `further`: that of other keys, None to take one out."""
        if self.body is None:
            return [self.data] if self.data else []
        body = self.body
        if plans is None and not further and salt_json is not None and body.keys().isdisjoint(_SPLICED_KEYS):
            return body.with_member(b'"cache_salt":' + salt_json)
        changes: dict[str, bytes | None] = {}
        if salt_json is not None:
            changes["cache_salt"] = salt_json
        if plans is not None:
            changes["kv_transfer_params"] = plans
        elif not forward_kv_transfer_params and "kv_transfer_params" in body:
            changes["kv_transfer_params"] = None
        if "request_id" in body:
            changes["request_id"] = orjson.dumps(self.upstream_id)
        if further:
            changes |= further
        return body.spliced(changes) if changes else [self.data]

    def prefill_body(
        self, salt_json: bytes | None, request_id: str, further: Mapping[str, bytes | None] | None = None
    ) -> list[bytes]:
        """The body that has a worker compute the prompt and next to nothing besides: the same in all that the prompt,
        its names and its sampling depend on; one token, in one piece. `further`: as in `upstream_body`."""
        body = self.body
        assert body is not None  # noqa: S101  its prompt was named
        keys = body.keys()
        changes: dict[str, bytes | None] = dict.fromkeys(_ANSWER_KEYS & keys)
        changes.update(dict.fromkeys(_LENGTH_KEYS & keys, b"1"))
        if not _LENGTH_KEYS & changes.keys():
            changes["max_tokens"] = b"1"
        if salt_json is not None:
            changes["cache_salt"] = salt_json
        if "request_id" in keys:
            changes["request_id"] = orjson.dumps(request_id)
        if self.values.get("tool_choice") not in (None, "auto", "none"):
            # One token is no call of a tool, and engines that were asked for one refuse to say less.
            changes["tool_choice"] = b'"none"'
        if further:
            changes |= further
        return body.spliced(changes)


class _HeadFields(NamedTuple):
    """What a head alone says to the gateway."""

    kind: Kind
    keys: Container[str] | None
    """What is read of a body with a prompt; None where there is none."""
    client_id: str
    content_type: bytes
    policy: str
    session: str
    fidelity: Fidelity | None
    ttft_budget_seconds: float | None
    timeout_seconds: float | None
    is_public: bool


def read_request(inbound: Inbound, tenant: Tenant, models: ServedModels, memory: BodyMemory | None = None) -> Request:
    """Understand a request. Raises BadRequest."""
    head = inbound.head
    fields: _HeadFields | None = head.notes.get("fields")
    if fields is None:
        fields = head.notes["fields"] = _head_fields(head, inbound.path)
    kind, keys, client_id, content_type, policy, session, fidelity, *bounds, is_public = fields
    ttft_budget_seconds, timeout_seconds = bounds
    request_id = upstream_id = f"{_OWN_ID}{next(_numbers):08x}"
    if client_id:
        request_id, upstream_id = client_id, f"{client_id}-{request_id[len('req-') :]}"
    body = _read_body(inbound, kind, content_type, memory, tenant.id)
    request = Request(request_id, upstream_id, kind, inbound, body, tenant)
    if policy:
        request.policy = policy
    if body is None:
        request.model = _model_of_form(inbound.body, content_type) or models.only_model()
    else:
        values = request.values = body.select(_READ_KEYS) if keys is None else body.values(keys)
        _read_model(request, values.get("model"), models)
        if (stream := values.get("stream")) is not None:
            request.streams = _typed(stream, "stream", bool) or False
        if not _OPTION_KEYS.isdisjoint(values):
            _read_options(request, values)
        if kind is not _CHAT and kind is not _COMPLETION:
            _read_foreign_options(request, values)
    if session:
        request.session = session
    if is_public:
        _open_to_all(request)
    if fidelity is not None:
        request.fidelity = fidelity
    if ttft_budget_seconds is not None:
        request.ttft_budget_seconds = ttft_budget_seconds
    if timeout_seconds is not None:
        request.timeout_seconds = timeout_seconds
    return request


def _head_fields(head: RequestHead, path: str) -> _HeadFields:
    fields = _gateway_fields(head)
    kind = Kind.of(head.method.decode("latin-1"), path) or Kind.OTHER
    return _HeadFields(
        kind,
        _KEYS_OF.get(kind),
        _client_request_id(fields.get(b"x-request-id")),
        fields.get(b"content-type", b""),
        fields.get(b"x-ropeway-policy", b"").decode("latin-1"),
        fields.get(b"x-ropeway-session", b"").decode("latin-1")[:SESSION_CHARACTERS_MAX],
        _fidelity(fields.get(FIDELITY_HEADER)),
        _seconds(fields, TTFT_BUDGET_HEADER),
        _seconds(fields, TIMEOUT_HEADER),
        _is_public(fields.get(NAMESPACE_HEADER)),
    )


def _is_public(stated: bytes | None) -> bool:
    if stated not in (None, b"tenant", b"public"):
        raise BadRequest("x-ropeway-namespace is one of tenant, public.", param="x-ropeway-namespace")
    return stated == b"public"


def _open_to_all(request: Request) -> None:
    """Name its blocks under the key of all tenants. Raises ServiceError."""
    if not request.tenant.public:
        raise Forbidden("this key may not share KV with all tenants", param="x-ropeway-namespace")
    if request.client_salt:
        raise BadRequest("a request is public or has a 'cache_salt' of its own, not both", param="cache_salt")
    request.namespace = PUBLIC


def _fidelity(stated: bytes | None) -> Fidelity | None:
    if stated is None:
        return None
    fidelity = FIDELITIES.get(stated)
    if fidelity is None:
        known = ", ".join(name.decode() for name in FIDELITIES)
        raise BadRequest(f"x-ropeway-fidelity is one of {known}.", param="x-ropeway-fidelity")
    return fidelity


def _seconds(fields: Mapping[bytes, bytes], header: bytes) -> float | None:
    stated = fields.get(header)
    if stated is None:
        return None
    milliseconds = int(stated) if stated.isdigit() and len(stated) <= len(str(MILLISECONDS_MAX)) else 0
    if not 0 < milliseconds <= MILLISECONDS_MAX:
        name = header.decode()
        raise BadRequest(f"{name} is a whole number of milliseconds, at most {MILLISECONDS_MAX}.", param=name)
    return milliseconds / 1e3


def credentials(head: RequestHead) -> bytes | None:
    """A client's key as an `Authorization` field, wherever its library puts it."""
    authorization = head.get(b"authorization")
    if authorization is not None:
        return authorization
    key = head.get(b"x-api-key")
    return None if key is None else b"Bearer " + key


def request_id_of(head: RequestHead | None) -> str:
    """The id to put on an answer for a request that was refused before it was understood."""
    client_id = _client_request_id(head.get(b"x-request-id")) if head is not None else ""
    return client_id or f"req-{_PROCESS_ID}{next(_numbers):08x}"


def _read_model(request: Request, model: Any, models: ServedModels) -> None:
    if not model:
        if request.kind in _NAMES_ITS_MODEL:
            raise BadRequest("you must provide a model parameter", param="model")
        model = models.only_model()
    request.model = _typed(model, "model", str) or ""


def _read_options(request: Request, values: Mapping[str, Any]) -> None:
    request.client_salt = _typed(values.get("cache_salt"), "cache_salt", str) or ""
    request.priority = _integer(values.get("priority"))
    request.states_priority = "priority" in values
    special = values.get("add_special_tokens")
    request.reshaped = values.get("truncate_prompt_tokens") is not None or (
        special is not None and special is not (request.kind is _COMPLETION or request.kind is Kind.EMBEDDING)
    )
    request.output_tokens_max = _integer(values.get("max_completion_tokens")) or _integer(values.get("max_tokens"))
    user = values.get("user")
    if isinstance(user, str):
        request.session = user[:SESSION_CHARACTERS_MAX]
    echoes = request.kind is _COMPLETION and bool(values.get("echo")) and values.get("logprobs") is not None
    # A count of 0 asks for them too.
    request.skips_cache = echoes or values.get("prompt_logprobs") is not None


def _read_foreign_options(request: Request, values: Mapping[str, Any]) -> None:
    """What other forms call otherwise."""
    if request.kind is Kind.RESPONSES:
        request.output_tokens_max = _integer(values.get("max_output_tokens"))
        session = values.get("prompt_cache_key")
    else:
        metadata = values.get("metadata") if request.kind is Kind.MESSAGES else None
        session = metadata.get("user_id") if isinstance(metadata, dict) else None
    if isinstance(session, str) and session:
        request.session = session[:SESSION_CHARACTERS_MAX]


def _typed(value: Any, key: str, kind: type[Value]) -> Value | None:
    """A value of the given type, or None as it is. Raises BadRequest for any other."""
    if value is None or isinstance(value, kind):
        return value
    raise BadRequest(f"'{key}' must be a {_KIND_NAMES[kind]}.", param=key)


def _integer(value: Any) -> int:
    """For the gateway's own estimates: what is not an integer counts as absent."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _gateway_fields(head: RequestHead) -> Mapping[bytes, bytes]:
    return {
        name: value
        for name, value in head.headers
        if name == b"x-request-id" or name == b"content-type" or name.startswith(b"x-ropeway-")
    }


def _client_request_id(value: bytes | None) -> str:
    """The client's request id if it is fit for logs and headers."""
    return value.decode("ascii") if value and _REQUEST_ID(value) else ""


def _read_body(
    inbound: Inbound, kind: Kind, content_type: bytes, memory: BodyMemory | None, tenant: str
) -> Body | None:
    if kind is _OTHER and (not inbound.body or _is_form(content_type)):
        return None
    # Whatever it is labelled, a worker may read it as JSON: unread, it would carry keys past us that are ours to set.
    if not inbound.body:
        raise BadRequest("The request has no body.")
    return Body(inbound.body, memory, tenant)


def _model_of_form(data: bytes, content_type: bytes) -> str:
    """The `model` part of a multipart form (audio, files)."""
    if not _is_form(content_type):
        return ""
    match = _MULTIPART_MODEL.search(data)
    return match[1].decode("utf-8", "replace") if match else ""


def _is_form(content_type: bytes) -> bool:
    return content_type.lower().startswith(b"multipart/form-data")
