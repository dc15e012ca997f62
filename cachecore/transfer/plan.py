"""Plans: which run of blocks a worker pulls, from whom, as what, and by when.

The gateway writes one into the request's `kv_transfer_params` under "ropeway":

    {"version": 1, "source": "w/worker-a/7/0", "addresses": ["tcp://10.0.0.7:7100"], "start_block": 0, "blocks": 59,
     "parent": "<hex>", "tail": "<hex>", "source_position": 0, "target_position": 0, "codec": "i8",
     "deadline_seconds": 0.4, "capability": "rwc1...."}

Whoever reaches the worker can write such an object, so nothing in it counts before `read_plan` has found it to be what
its capability signs: a plan that names another address, position or deadline than the gateway's is refused. A plan
names blocks to fetch and never hashes to trust: at its own position, the puller compares the tail with the name that it
computed from the prompt's tokens; elsewhere it compares the tokens themselves.
"""

from hashlib import blake2b
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from cachecore.blocks import PrefixHash
from cachecore.holders import Holder
from cachecore.index.schema import HOLDER_ID_BYTES_MAX, holder_id, parse_holder
from cachecore.scope import Fidelity, KeyId, Keyring
from cachecore.transfer.capability import (
    CAPABILITY_CHARACTERS_MAX,
    Capability,
    Run,
    check_target,
    read_capability,
)
from cachecore.transfer.errors import PlanError, Reason

PARAMETER = "ropeway"
"""The key in `kv_transfer_params`."""
FRACTION_PARAMETER = "ropeway_recompute_fraction"
"""Another: how many of its passages' tokens a prompt recomputes, 0..1. Not signed: what is repaired is the prompt's
own, and exact KV is never made of it."""
PLANS_MAX = 64
"""Of one request; what comes after is left unread."""
DEADLINE_SECONDS_MAX = 600.0
ADDRESSES_MAX = 8

_HexName = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_Address = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9+]{0,15}://[A-Za-z0-9._:%\[\]/-]{1,255}$")]


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON form."""

    version: Literal[1]
    source: Annotated[str, msgspec.Meta(max_length=HOLDER_ID_BYTES_MAX)]
    addresses: Annotated[list[_Address], msgspec.Meta(max_length=ADDRESSES_MAX)]
    start_block: _Count
    blocks: Annotated[int, msgspec.Meta(ge=1, le=2**32 - 1)]
    parent: _HexName
    tail: _HexName
    source_position: _Count
    target_position: _Count
    codec: Annotated[str, msgspec.Meta(pattern="^[a-z0-9][a-z0-9._-]{0,31}$")]
    deadline_seconds: Annotated[float, msgspec.Meta(gt=0, le=DEADLINE_SECONDS_MAX)]
    capability: Annotated[str, msgspec.Meta(max_length=CAPABILITY_CHARACTERS_MAX)]


class Plan(NamedTuple):
    """What the gateway decided. Signed by `sign`."""

    source: Holder
    addresses: tuple[str, ...]
    """Where the source serves, best first: `scheme://host:port` of a transport. Empty where the puller knows: pools."""
    run: Run
    source_position: int
    """Of the run's first token when its KV was computed."""
    target_position: int
    """Where the puller wants it. Elsewhere than at the source's position keys are turned."""
    codec: str
    deadline_seconds: float
    """From the moment the worker begins to pull."""

    @property
    def is_shifted(self) -> bool:
        return self.source_position != self.target_position

    def digest(self) -> bytes:
        """What a capability signs of a plan."""
        facts = (
            holder_id(self.source).decode(),
            self.addresses,
            self.run.first_block,
            self.run.blocks,
            self.run.parent.hex(),
            self.run.tail.hex(),
            self.source_position,
            self.target_position,
            self.codec,
            float(self.deadline_seconds),
        )
        return blake2b(msgspec.json.encode(facts), digest_size=16, person=b"ropeway.plan.v1").digest()


class Grant(NamedTuple):
    """For whom a plan is, and until when."""

    key_id: KeyId
    target: Holder
    fidelity: Fidelity
    """The worst that the request accepts."""
    expires_at: float
    """Unix seconds."""


class Pull(NamedTuple):
    """A plan that is authentic and meant for this worker, with the right to carry it out."""

    plan: Plan
    capability: Capability
    token: str
    """The capability's text, for the source."""


def sign(plan: Plan, grant: Grant, keyring: Keyring) -> dict[str, Any]:
    """The JSON form with its capability. Raises KeyError when the keyring lacks the tenant's key epoch, PlanError for
    a plan that no worker would take."""
    capability = Capability(
        grant.key_id,
        plan.source,
        grant.target,
        plan.run,
        plan.codec,
        grant.fidelity,
        grant.expires_at,
        plan.digest(),
    )
    document = {
        "version": 1,
        "source": holder_id(plan.source).decode(),
        "addresses": list(plan.addresses),
        "start_block": plan.run.first_block,
        "blocks": plan.run.blocks,
        "parent": plan.run.parent.hex(),
        "tail": plan.run.tail.hex(),
        "source_position": plan.source_position,
        "target_position": plan.target_position,
        "codec": plan.codec,
        "deadline_seconds": plan.deadline_seconds,
        "capability": capability.mint(keyring),
    }
    _parse(document)
    return document


def read_plan(document: object, keyring: Keyring, target: Holder, now: float) -> Pull:
    """From `kv_transfer_params["ropeway"]`, whatever that is. `target` is oneself; `now` in unix seconds.

    Raises PlanError or CapabilityError.
    """
    parsed = _parse(document)
    plan = _plan_of(parsed)
    capability = read_capability(parsed.capability, keyring, now)
    check_target(capability, target)
    if capability.plan_digest != plan.digest():
        raise PlanError("a plan that says something else than its capability", Reason.FORGED)
    return Pull(plan, capability, parsed.capability)


def _parse(document: object) -> _Document:
    try:
        return msgspec.convert(document, _Document)
    except (msgspec.ValidationError, RecursionError) as error:
        raise PlanError(f"a plan that does not parse: {error}", Reason.MALFORMED) from error


def _plan_of(parsed: _Document) -> Plan:
    run = Run(_name(parsed.parent), _name(parsed.tail), parsed.start_block, parsed.blocks)
    try:
        source = parse_holder(parsed.source.encode())
    except ValueError as error:
        raise PlanError(f"a plan's source: {error}", Reason.MALFORMED) from error
    positions = parsed.source_position, parsed.target_position
    return Plan(source, tuple(parsed.addresses), run, *positions, parsed.codec, parsed.deadline_seconds)


def _name(text: str) -> PrefixHash:
    return PrefixHash(bytes.fromhex(text))
