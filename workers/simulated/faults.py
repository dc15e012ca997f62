"""What a simulated worker can be told to do wrong."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from workers.simulated.link import TransferFault

EventFault = Literal["drop", "reorder", "duplicate", "silence", "mute", "hoard", "close"]
Milliseconds = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Set for one request by the header `x-simulate`, or for all that follow by `POST /simulate`; JSON both times.

    Those behind `requests` concern a worker as a whole and are read, as are `paths` and `requests` themselves, from
    `POST /simulate` alone.
    """

    delay_first_ms: Milliseconds = 0.0
    """Wait before the status line."""
    chunk_gap_ms: Milliseconds = 0.0
    """Wait before every further piece of the body."""
    die_after_chunks: Count | None = None
    """Reset the connection after so many server-sent events."""
    cut_stream_bytes: Count | None = None
    """Close the connection after so many bytes of the body."""
    omit_done: bool = False
    """Leave out `data: [DONE]`."""
    status: Annotated[int, Meta(ge=200, le=599)] | None = None
    """Answer with this status without asking the engine."""
    body: Any = None
    """With `status`: text as it is, anything else as JSON; None is an OpenAI error object."""
    hang: bool = False
    """Take the request and never answer."""
    echo: bool = False
    """Answer with what was received."""
    paths: tuple[str, ...] = ("/v1/",)
    """The paths, by their beginnings, that standing faults apply to."""
    requests: Count | None = None
    """How many requests standing faults apply to; None for all."""
    events: EventFault | None = None
    """drop: lose batches on the way; reorder: each second batch before the first; duplicate: send twice; silence: send
    and keep nothing, not even for replay; mute: say nothing in batches that are sent as ever; hoard: say nothing of
    what is removed; close: close the socket, and open it again once this fault is over."""
    events_batches: Count | None = None
    """How many batches `events` applies to; None for all."""
    transfer: TransferFault | None = None
    """What becomes of pulls from this worker. refuse: they are told that it is busy; hang: they are told nothing; fail:
    they end half-way."""
    transfer_pulls: Count | None = None
    """How many pulls `transfer` applies to; None for all."""


NO_FAULTS = Faults()

_decode = msgspec.json.Decoder(Faults).decode


def read_faults(text: bytes) -> Faults:
    """Raises ValueError that says what is wrong."""
    try:
        return _decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error
