"""Requests that an operator has pinned to a worker: a session's, a tenant's, or those whose prompt begins so.

A pin steers and never refuses: where its worker cannot take a request (away, draining, given up after a failure) the
policy chooses among all others, as ever. Pins are this gateway's own and end with it.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from cachecore.blocks import HASH_BYTES, Chain
from gateway.errors import BadRequest, NotFound
from gateway.fleet.worker import WorkerRecord
from gateway.requests import SESSION_CHARACTERS_MAX, Request

PINS_MAX = 1024
PREFIX_PINS_MAX = 64
"""A prompt is searched for each of them."""

Text = Annotated[str, msgspec.Meta(max_length=SESSION_CHARACTERS_MAX)]
Prefix = Annotated[str, msgspec.Meta(pattern=f"^([0-9a-f]{{{2 * HASH_BYTES}}})?$")]


class Subject(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which requests: those of which all that is said here is true. What is empty says nothing."""

    tenant: Text = ""
    session: Text = ""
    """As `x-ropeway-session` or `user` names it."""
    prefix: Prefix = ""
    """Name of a block that their prompts contain, in hexadecimal, as `GET /admin/prefixes` lists it."""


class Pin(Subject, frozen=True, forbid_unknown_fields=True, kw_only=True):
    worker: Annotated[str, msgspec.Meta(min_length=1)]

    @property
    def subject(self) -> Subject:
        return Subject(tenant=self.tenant, session=self.session, prefix=self.prefix)


class Pins:
    """At most `PINS_MAX`, of which `PREFIX_PINS_MAX` name prefixes. Of several that apply a session's comes before a
    prefix's, and either before a tenant's."""

    def __init__(self) -> None:
        self._pins: dict[Subject, str] = {}
        self._prefixes: list[tuple[bytes, Subject]] = []

    def __len__(self) -> int:
        return len(self._pins)

    def __repr__(self) -> str:
        return f"Pins({self.listed()})"

    def listed(self) -> list[Pin]:
        return [
            Pin(worker=worker, tenant=subject.tenant, session=subject.session, prefix=subject.prefix)
            for subject, worker in self._pins.items()
        ]

    def put(self, pin: Pin) -> None:
        """Takes the place of an earlier one of the same subject. Raises BadRequest."""
        subject = pin.subject
        if subject == Subject():
            raise BadRequest("a pin names a session, a tenant or a prefix")
        if subject not in self._pins:
            if len(self._pins) >= PINS_MAX:
                raise BadRequest(f"there are {PINS_MAX} pins already")
            if subject.prefix and len(self._prefixes) >= PREFIX_PINS_MAX:
                raise BadRequest(f"there are {PREFIX_PINS_MAX} pins of prefixes already")
        self._pins[subject] = pin.worker
        self._list_prefixes()

    def delete(self, subject: Subject) -> None:
        """Raises NotFound."""
        if self._pins.pop(subject, None) is None:
            raise NotFound("there is no such pin")
        self._list_prefixes()

    def _list_prefixes(self) -> None:
        self._prefixes = [(bytes.fromhex(subject.prefix), subject) for subject in self._pins if subject.prefix]

    def narrow(self, request: Request, chain: Chain, candidates: list[WorkerRecord]) -> list[WorkerRecord]:
        """The pinned worker alone, where there is a pin and its worker is among the candidates."""
        worker = self._worker_of(request, chain)
        pinned = [record for record in candidates if record.name == worker] if worker else []
        return pinned or candidates

    def _worker_of(self, request: Request, chain: Chain) -> str | None:
        tenant, session, pins = request.tenant.id, request.session, self._pins
        if session:
            for named in (tenant, ""):
                worker = pins.get(Subject(tenant=named, session=session))
                if worker is not None:
                    return worker
        for block, subject in self._prefixes:
            if subject.tenant in ("", tenant) and subject.session in ("", session) and contains(chain, block):
                return pins[subject]
        return pins.get(Subject(tenant=tenant))


def contains(chain: Chain, block: bytes) -> bool:
    """Whether the block is one of the chain's."""
    start = chain.find(block)
    while start >= 0 and start % HASH_BYTES:
        start = chain.find(block, start + 1)
    return start >= 0


def as_document(pins: Sequence[Pin]) -> list[dict[str, str]]:
    return [msgspec.to_builtins(pin) for pin in pins]
