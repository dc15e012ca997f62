"""What gateways tell each other, and how it is written: one message is one entry of the notes stream.

    message = msgpack [version, gateway, run, sequence, inflight, notes]

`run` is another one each time a gateway starts; `sequence` counts its messages, so that a lost one is noticed;
`inflight` is how many of its requests are under way once the notes have been applied, so that a wrong account is too;
it is null where more notes are waiting to be sent.
No note carries a time of a sender's clock, which means nothing elsewhere: at most how long ago something was.

Every field is bounded here, so that whatever has been decoded can be applied: sizes, numbers that are numbers, chains
of whole names. One note out of bounds spoils its message.
"""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Raw, Struct

from policies.state.chains import HASH_BYTES

VERSION = 1
MESSAGE_BYTES_MAX = 8 * 1024 * 1024
CHAIN_BLOCKS_MAX = 1024
"""Of a longer chain the beginning is told: a prediction that is too short costs a little, a long note everybody."""
CHAIN_BYTES_MAX = CHAIN_BLOCKS_MAX * HASH_BYTES
LISTED_MAX = 16_384
TOKENS_MAX = 2**31
SECONDS_MAX = 86_400.0

GatewayId = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:-]+$")]
_RunId = Annotated[str, Meta(min_length=1, max_length=32)]
_RequestId = Annotated[str, Meta(min_length=1, max_length=512)]
_WorkerName = Annotated[str, Meta(min_length=1, max_length=512)]
_Epoch = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Rank = Annotated[int, Meta(ge=0, le=4095)]
_Tokens = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
_Seconds = Annotated[float, Meta(ge=0.0, le=SECONDS_MAX)]
_Chain = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=CHAIN_BYTES_MAX)]


class NoteError(Exception):
    """A message that cannot be applied."""


class Dispatched(Struct, array_like=True, tag="d", gc=False):
    """A request was given to a worker; a request told of before has moved there (`InflightAccounting.dispatch`)."""

    request_id: _RequestId
    worker: _WorkerName
    epoch: _Epoch
    rank: _Rank
    prompt_tokens: _Tokens
    prefill_seconds: _Seconds
    output_tokens_max: _Tokens
    prior_seconds: _Seconds | None
    in_one_piece: bool
    age_seconds: _Seconds = 0.0
    """In a list: how long ago that was."""
    started: bool = False
    """In a list: whether its first token has come."""


class FirstToken(Struct, array_like=True, tag="t", gc=False):
    request_id: _RequestId


class Finished(Struct, array_like=True, tag="f", gc=False):
    request_id: _RequestId
    output_tokens: _Tokens
    answered: bool


class Predicted(Struct, array_like=True, tag="p", gc=False):
    """A worker will soon have this chain (`PredictedInsertions.predict`)."""

    request_id: _RequestId
    worker: _WorkerName
    epoch: _Epoch
    rank: _Rank
    chain: _Chain


class Withdrawn(Struct, array_like=True, tag="c", gc=False):
    """The prediction of a request holds no longer."""

    request_id: _RequestId


class Recorded(Struct, array_like=True, tag="r", gc=False):
    """A prompt with this chain was sent to a worker (`RoutingHistory.record`)."""

    worker: _WorkerName
    epoch: _Epoch
    rank: _Rank
    chain: _Chain


class Listed(Struct, array_like=True, tag="l", gc=False):
    """All of a gateway's requests under way, as of this message; not all of them unless `complete`."""

    complete: bool
    requests: Annotated[list[Dispatched], Meta(max_length=LISTED_MAX)]


class Wanted(Struct, array_like=True, tag="w", gc=False):
    """A gateway is asked for its list; everyone is where `gateway` is empty."""

    gateway: Annotated[str, Meta(max_length=128)] = ""


class DirectoryChanged(Struct, array_like=True, tag="g", gc=False):
    """The directory of workers is not what it was."""


class Leaving(Struct, array_like=True, tag="x", gc=False):
    """The gateway stops."""


Note = (
    Dispatched | FirstToken | Finished | Predicted | Withdrawn | Recorded | Listed | Wanted | DirectoryChanged | Leaving
)


class Message(NamedTuple):
    gateway: str
    run: str
    sequence: int
    inflight: int | None
    notes: list[Note]


class _Envelope(Struct, array_like=True, gc=False):
    version: Annotated[int, Meta(ge=0)]
    gateway: GatewayId
    run: _RunId
    sequence: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    inflight: Annotated[int, Meta(ge=0, le=2**31)] | None
    notes: Raw


_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(_Envelope)
_note_lists = msgspec.msgpack.Decoder(list[Note])


def encode(gateway: str, run: str, sequence: int, inflight: int | None, notes: Sequence[Note]) -> bytes:
    return _encoder.encode(_Envelope(VERSION, gateway, run, sequence, inflight, Raw(_encoder.encode(notes))))


def signature(gateway: str, run: str) -> bytes:
    """What every message of one run begins with: its own are recognised without decoding."""
    # An array of six (0x96), then its first three.
    return b"\x96" + _encoder.encode(VERSION) + _encoder.encode(gateway) + _encoder.encode(run)


def decode(data: bytes) -> Message:
    """Raises NoteError for anything that is not wholly well-formed, and for another version's."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise NoteError(f"a message of {len(data)} bytes")
    try:
        envelope = _envelopes.decode(data)
        if envelope.version != VERSION:
            raise NoteError(f"version {envelope.version}, not {VERSION}")
        notes = _note_lists.decode(envelope.notes)
    except (msgspec.DecodeError, ValueError) as error:
        raise NoteError(str(error)) from error
    for note in notes:
        if isinstance(note, Predicted | Recorded) and len(note.chain) % HASH_BYTES:
            raise NoteError(f"a chain of {len(note.chain)} bytes")
    return Message(envelope.gateway, envelope.run, envelope.sequence, envelope.inflight, notes)
