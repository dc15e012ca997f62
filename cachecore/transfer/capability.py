"""A capability: the gateway's word that one worker may pull one run from one holder, until a given moment.

It is signed under a key of the run's tenant and travels in a plan. Source and puller both check it, each for what it
knows best: the source that it is meant itself, in this life, and that the run is the tenant's; the puller that the rest
of the plan is the one that was signed (`plan_digest`). It is of no use to who merely saw it: a request on the wire
proves besides that the puller has the tenant's key (`proof`).

    rwc1.<base64url of the body and its MAC>
    body: version (u8) | key epoch (u32) | expiry, unix ms (u64) | parent (16) | tail (16) | plan digest (16)
          | first block, blocks (u32) | worst fidelity (u8) | lengths of tenant, codec, source, target (u16)
          | tenant | codec | source | target                                       (holder ids, as in the index)
    MAC:  the first 16 bytes of HMAC-SHA256(capability key, "capability.v1" | body)
"""

import base64
import binascii
import hmac
import re
import struct
from dataclasses import dataclass
from typing import NamedTuple

from cachecore.blocks import PrefixHash
from cachecore.holders import Holder, Pool
from cachecore.index.schema import holder_id, parse_holder
from cachecore.scope import Fidelity, KeyId, Keyring, TenantId
from cachecore.transfer.errors import CapabilityError, Reason

PROOF_BYTES = 32
CAPABILITY_CHARACTERS_MAX = 4096

_PREFIX = "rwc1."
_VERSION = 1
_MAC_BYTES = 16
_FIXED = struct.Struct("<BIQ16s16s16sIIB4H")
_CODEC = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")


class Run(NamedTuple):
    """Consecutive blocks of one chain. Its tail's name says which, and the name of the block before it confirms it."""

    parent: PrefixHash
    tail: PrefixHash
    first_block: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Capability:
    key_id: KeyId
    """Of the tenant whose KV it is (or `public`), with the epoch of the keys that its blocks are named under."""
    source: Holder
    target: Holder
    run: Run
    codec: str
    fidelity: Fidelity
    """The worst that may be delivered."""
    expires_at: float
    """Unix seconds; to the millisecond on the wire."""
    plan_digest: bytes
    """16 bytes: what the plan around it says (`cachecore.transfer.plan`)."""

    def mint(self, keyring: Keyring) -> str:
        """The text form. Raises KeyError when the keyring lacks the key epoch, CapabilityError for what has none."""
        body = self._encode()
        return _PREFIX + _base64(body + _mac(keyring, self.key_id, b"capability.v1", body)[:_MAC_BYTES])

    def prove(self, keyring: Keyring, challenge: bytes, request: bytes) -> bytes:
        """What a puller adds to a request: that it has the tenant's key, here and now, and asks for just this."""
        return _mac(keyring, self.key_id, b"proof.v1" + len(challenge).to_bytes(2, "little"), challenge + request)

    def _encode(self) -> bytes:
        ids = [self.key_id.tenant.encode(), self.codec.encode(), holder_id(self.source), holder_id(self.target)]
        try:
            fixed = _FIXED.pack(
                _VERSION,
                self.key_id.epoch,
                round(self.expires_at * 1000),
                self.run.parent,
                self.run.tail,
                self.plan_digest,
                self.run.first_block,
                self.run.blocks,
                self.fidelity,
                *map(len, ids),
            )
        except struct.error as error:
            raise CapabilityError(f"a capability that cannot be written: {error}", Reason.MALFORMED) from error
        return b"".join((fixed, *ids))


def read_capability(text: str, keyring: Keyring, now: float) -> Capability:
    """An authentic capability that has not expired. `now` in unix seconds. Raises CapabilityError."""
    capability, body, mac = _parse(text)
    try:
        expected = _mac(keyring, capability.key_id, b"capability.v1", body)[:_MAC_BYTES]
    except KeyError:
        raise CapabilityError(f"no key for {capability.key_id}", Reason.FORGED) from None
    if not hmac.compare_digest(expected, mac):
        raise CapabilityError("a capability does not authenticate", Reason.FORGED)
    if now >= capability.expires_at:
        late = now - capability.expires_at
        raise CapabilityError(f"a capability expired {late:.3f} s ago", Reason.EXPIRED)
    return capability


def check_source(capability: Capability, holder: Holder) -> None:
    """Raises CapabilityError unless `holder` is the one that it lets be pulled from."""
    if capability.source != holder:
        message = f"a capability to pull from {capability.source}; this is {holder}"
        raise CapabilityError(message, _difference(capability.source, holder))


def check_target(capability: Capability, holder: Holder) -> None:
    if capability.target != holder:
        message = f"a capability for {capability.target}; this is {holder}"
        raise CapabilityError(message, Reason.OTHER_TARGET)


def check_proof(capability: Capability, keyring: Keyring, challenge: bytes, request: bytes, proof: bytes) -> None:
    if not hmac.compare_digest(capability.prove(keyring, challenge, request), proof):
        raise CapabilityError("a puller that does not have the tenant's key", Reason.FORGED)


def _difference(meant: Holder, found: Holder) -> Reason:
    """Why they are not the same: another life of the same one, or another one."""
    if meant.name != found.name or type(meant) is not type(found):
        return Reason.OTHER_SOURCE
    if isinstance(meant, Pool):
        return Reason.OTHER_EPOCH
    return Reason.OTHER_EPOCH if meant[1] != found[1] else Reason.OTHER_SOURCE


def _mac(keyring: Keyring, key_id: KeyId, label: bytes, message: bytes) -> bytes:
    return hmac.digest(keyring.capability_key(key_id), label + message, "sha256")


def _parse(text: str) -> tuple[Capability, bytes, bytes]:
    """A capability with the bytes that are signed and the MAC that claims to be theirs."""
    if not text.startswith(_PREFIX) or len(text) > CAPABILITY_CHARACTERS_MAX:
        raise CapabilityError(f"not a capability: {text[:20]!r}", Reason.MALFORMED)
    encoded = text.removeprefix(_PREFIX)
    try:
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        if _base64(data) != encoded:
            raise ValueError("bits are left over")
        body, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        return _decode(body), body, mac
    except (ValueError, binascii.Error, struct.error) as error:
        raise CapabilityError(f"a capability that does not parse: {error}", Reason.MALFORMED) from error


def _decode(body: bytes) -> Capability:
    version, epoch, expires_ms, parent, tail, digest, first, blocks, fidelity, *lengths = _FIXED.unpack_from(body)
    if version != _VERSION or len(body) != _FIXED.size + sum(lengths) or not blocks:
        raise ValueError(f"version {version}, {len(body)} bytes, {blocks} blocks")
    tenant, codec, source, target = _cut(body[_FIXED.size :], lengths)
    if not _CODEC.fullmatch(codec.decode("ascii")):
        raise ValueError(f"a codec called {codec!r}")
    return Capability(
        KeyId(TenantId(tenant.decode("ascii")), epoch),
        parse_holder(source),
        parse_holder(target),
        Run(PrefixHash(parent), PrefixHash(tail), first, blocks),
        codec.decode(),
        Fidelity(fidelity),
        expires_ms / 1000,
        digest,
    )


def _cut(data: bytes, lengths: list[int]) -> list[bytes]:
    parts = []
    for length in lengths:
        parts.append(data[:length])
        data = data[length:]
    return parts


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
