"""What a worker is sent otherwise than the client wrote it: header lines, and the keys of a body that are ours."""

from collections.abc import Mapping

import orjson

from cachecore.prompts.contract import NamedPrompt
from gateway.config import PrioritiesConfig
from gateway.edge.http1 import RequestHead, forwardable
from gateway.fleet.engines.contract import EngineTraits
from gateway.fleet.worker import ModelPool, Parity, WorkerRecord
from gateway.prompts import Prompts
from gateway.requests import KEY_HEADERS, NOT_FORWARDED, Kind, Request

# Members of enumerations are looked up by a slow path.
_PROVEN = Parity.PROVEN
CREDENTIAL_HEADERS = KEY_HEADERS | {b"api-key", b"cookie", b"x-goog-api-key"}
"""What clients prove themselves with, here or elsewhere: none of a worker's business where keys are the gateway's."""
FORWARDED_HEADERS = frozenset({b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host"})
TRACE_HEADERS = frozenset({b"traceparent", b"tracestate"})
_OPENINGS_MAX = 64
"""Workers that one head is written out for, until it is done anew."""

Changes = Mapping[str, bytes | None]
"""JSON by key; None takes a key out."""


class Outbound:
    """Shared by all requests of a gateway."""

    def __init__(
        self,
        prompts: Prompts,
        priorities: PrioritiesConfig,
        forward_token_ids: bool,
        forward_kv_transfer_params: bool,
        forward_authorization: bool,
        introduced_as: bytes = b"",
    ) -> None:
        """`introduced_as`: the scheme that clients speak to this gateway, where workers are told of clients."""
        self._prompts = prompts
        self._priorities = priorities
        self._forward_token_ids = forward_token_ids
        self._forward_kv_transfer_params = forward_kv_transfer_params
        self._not_forwarded = NOT_FORWARDED if forward_authorization else NOT_FORWARDED | CREDENTIAL_HEADERS

        self._introduced_as = introduced_as
        if introduced_as:
            self._not_forwarded |= FORWARDED_HEADERS

    def trace(self) -> None:
        """Workers get the gateway's own word of traces, not the client's."""
        self._not_forwarded |= TRACE_HEADERS

    def opening(self, request: Request, worker: WorkerRecord) -> bytes:
        """A request to a worker up to its id, with the client's header lines that travel: all but a key of ours."""
        head = request.head
        openings: dict[str, bytes] | None = head.notes.get("openings")
        if openings is None:
            openings = head.notes["openings"] = {}
        opening = openings.get(worker.url)
        if opening is None:
            forwarded = b"".join(b"%b: %b\r\n" % field for field in forwardable(head.headers, self._not_forwarded))
            if self._introduced_as:
                forwarded += _introduction(head, request.client.encode(), self._introduced_as)
            opening = b"%b %b HTTP/1.1\r\nhost: %b\r\n%bx-request-id: "
            opening %= (head.method, head.target, worker.authority, forwarded)
            if len(openings) >= _OPENINGS_MAX:
                openings.clear()
            openings[worker.url] = opening
        return opening

    def changes(
        self,
        request: Request,
        pool: ModelPool,
        named: NamedPrompt,
        worker: WorkerRecord,
        plans: bytes | None,
        queue_key_seconds: float,
    ) -> Changes | None:
        """What of a body is not as the client wrote it besides salt, plans and id: its priority, and its prompt as
        token ids. None where nothing is."""
        priorities, states_priority = self._priorities, request.states_priority or self._priorities.by_work
        if not states_priority and not self._forward_token_ids:
            return None
        changes: dict[str, bytes | None] = {}
        if states_priority:
            changes["priority"] = None
            level = min(max(request.priority, priorities.lowest), priorities.highest)
            if priorities.by_work and worker.traits.priorities:
                changes["priority"] = b"%d" % ((queue_key_seconds + level * priorities.level_seconds) * 1e3)
            elif priorities.forwarded and worker.traits.priorities:
                changes["priority"] = b"%d" % level
        if self._forward_token_ids and worker.parity is _PROVEN and not request.values.get("echo"):
            changes |= self._prompt_as_tokens(request, pool, named, worker.traits, plans)
        return changes

    def _prompt_as_tokens(
        self, request: Request, pool: ModelPool, named: NamedPrompt, traits: EngineTraits, plans: bytes | None
    ) -> Changes:
        """Nothing where the engine takes none, or the prompt is not known to the end."""
        is_chat = request.kind is Kind.CHAT
        takes_them = traits.chat_token_ids if is_chat else traits.token_ids
        if request.foreign or not takes_them or not named.complete or request.question() is None:
            return {}
        if is_chat and self._forward_kv_transfer_params and "kv_transfer_params" in request.values:
            return {}
        tokens = self._prompts.tokens_of(request, pool)
        if not tokens:
            return {}
        listed = orjson.dumps(tokens.tolist())
        if not is_chat:
            return {"prompt": listed}
        return {"kv_transfer_params": b'{"prompt_token_ids":%b%b' % (listed, b"," + plans[1:] if plans else b"}")}


def _introduction(head: RequestHead, client: bytes, scheme: bytes) -> bytes:
    """Who asks, the way proxies say it to each other: what one before us has said stays, and the address that we see
    comes last. So that is the one entry which no client can make up."""
    said: dict[bytes, list[bytes]] = {name: [] for name in sorted(FORWARDED_HEADERS)}
    host = b""
    for name, value in head.headers:
        if name in said:
            said[name].append(value)
        elif name == b"host":
            host = value
    said[b"x-forwarded-for"].append(client)
    said[b"x-forwarded-proto"] = said[b"x-forwarded-proto"] or [scheme]
    said[b"x-forwarded-host"] = said[b"x-forwarded-host"] or [host]
    values = ((name, b", ".join(filter(None, values))) for name, values in said.items())
    return b"".join(b"%b: %b\r\n" % field for field in values if field[1])


def asking_for_usage(request: Request) -> bytes | None:
    """The `stream_options` of a stream that would not bring its usage, so that it does; None where it does already."""
    body = request.body
    options = body.values({"stream_options"}).get("stream_options") if body is not None else None
    if options is not None and (not isinstance(options, dict) or options.get("include_usage")):
        return None
    return orjson.dumps({**(options or {}), "include_usage": True})
