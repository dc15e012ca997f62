"""Which requests are asked in another form than they came in.

A form is left as it is where every worker of its model serves the route itself and keeps tenants apart on it: its
engine has no salts at all, or takes one there. Else each of them is asked for a chat completion, which is salted, can
be told what KV to pull, and is named to its end.
"""

from collections.abc import Coroutine
from typing import Any

import msgspec

from gateway.api.errors import Untranslatable
from gateway.api.forms import FORMS, ROUTE_OF, Asked, Form
from gateway.api.translated import Translated
from gateway.config import TranslationName
from gateway.edge.body import Body
from gateway.edge.http1 import RequestHead
from gateway.edge.server import Inbound
from gateway.fleet.worker import ModelPool, WorkerRecord
from gateway.journey import Journey
from gateway.requests import Request, credentials

_OF_THE_FORM = frozenset({b"content-type", b"anthropic-version", b"anthropic-beta", b"x-api-key"})
"""Header fields that say something of the body as it was, or are of no use to a worker."""
_TRANSLATED = "translated_head"


class Translator:
    """Shared by all requests of a gateway."""

    def __init__(self, mode: TranslationName = "auto") -> None:
        self._mode = mode

    def concerns(self, request: Request, pool: ModelPool) -> bool:
        """Whether a request is to be asked in another form."""
        if request.path not in FORMS or self._mode == "never":
            return False
        route = ROUTE_OF[request.path]
        workers = [worker for worker in pool.workers if worker.eligible] or pool.workers
        return self._mode == "always" or not all(_serves(worker, route) for worker in workers)

    def asked(self, request: Request) -> Asked:
        """Raises Untranslatable."""
        body = request.body
        if body is None:
            raise Untranslatable("a JSON object is expected")
        return Asked(FORMS[request.path], _whole(body))


def _whole(body: Body) -> dict[str, Any]:
    return body.values(body.keys())


def _serves(worker: WorkerRecord, route: str) -> bool:
    routes = worker.discovery.routes if worker.discovery is not None else None
    kept_apart = not worker.traits.salts or route in worker.traits.salted_paths
    return routes is not None and route in routes and kept_apart


def inbound_of(inbound: Inbound, asked: Asked) -> Inbound:
    """The request as it is asked. Raises Untranslatable."""
    body = asked.body()
    return Inbound(_head_of(inbound.head, asked.form, len(body)), asked.form.path, body, inbound.client)


def _head_of(head: RequestHead, form: Form, length: int) -> RequestHead:
    known: RequestHead | None = head.notes.get(_TRANSLATED)
    if known is None:
        headers = [field for field in head.headers if field[0] not in _OF_THE_FORM]
        headers.append((b"content-type", b"application/json"))
        key = credentials(head)
        if key is not None and head.get(b"authorization") is None:
            # Where clients' keys are the engines', these look for it there.
            headers.append((b"authorization", key))
        notes = {key: head.notes[key] for key in ("tenant",) if key in head.notes}
        known = msgspec.structs.replace(head, target=form.path.encode(), headers=headers, notes=notes)
        head.notes[_TRANSLATED] = known
    return known.with_length(length)


def translated(
    begun: Journey | Coroutine[Any, Any, Journey], asked: Asked
) -> Translated | Coroutine[Any, Any, Translated]:
    """A journey, begun at once or later, whose answer its client gets in its own form."""
    return Translated(begun, asked, begun.named.token_count) if isinstance(begun, Journey) else _later(begun, asked)


async def _later(begun: Coroutine[Any, Any, Journey], asked: Asked) -> Translated:
    journey = await begun
    return Translated(journey, asked, journey.named.token_count)
