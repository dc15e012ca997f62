"""What may go wrong when KV moves.

TransferError              knows its reason; its message is fit for an operator
├── FrameError             bytes that are no frame, or a frame that is not what it must be
│   └── ForgedFrame        its authentication fails: tampered with, damaged, or made under another key
├── CapabilityError        a capability that does not parse, authenticate, or hold here and now
├── PlanError              a plan that does not parse, or says something else than its capability
├── WireError              a message out of place, or a connection that ended
├── EngineUnavailable      an engine behind a transport that is not there or does not start (`engines.contract`)
└── Unserved               raised by a `Source`: it does not serve this, or cannot go on
"""

from enum import StrEnum


class Reason(StrEnum):
    """Why a transfer did not bring what it was to bring: a label of metrics, and a code on the wire (by place here, so
    that new ones go last)."""

    MALFORMED = "malformed"
    """Bytes, a capability or a plan that do not parse."""
    FORGED = "forged"
    """An authentication that does not match, or a key epoch that is not in the keyring."""
    EXPIRED = "expired"
    OTHER_TENANT = "other_tenant"
    OTHER_SOURCE = "other_source"
    """The plan means somebody else: another worker or pool, or another rank."""
    OTHER_EPOCH = "other_epoch"
    """The source has restarted, or the pool has been wiped, since the plan was made."""
    OTHER_TARGET = "other_target"
    INCOMPATIBLE = "incompatible"
    """Another compatibility class, or another shape than one's own."""
    STALE = "stale"
    """The source does not hold the run, or holds it no longer."""
    BUSY = "busy"
    UNREACHABLE = "unreachable"
    CLOSED = "closed"
    """The connection ended before the transfer did."""
    STALLED = "stalled"
    """Nothing came for as long as the puller is willing to wait for the next byte."""
    DEADLINE = "deadline"
    INCOMPLETE = "incomplete"
    """The source said that it was done before it was."""
    UNEXPECTED = "unexpected"
    """An authentic frame that was not asked for: another run, layer, codec or fidelity."""
    UNUSABLE = "unusable"
    """An authentic frame that the sink could make nothing of."""
    INTERNAL = "internal"
    """A defect of the source."""


REASONS: tuple[Reason, ...] = tuple(Reason)


class TransferError(Exception):
    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


class FrameError(TransferError):
    def __init__(self, message: str, reason: Reason = Reason.MALFORMED) -> None:
        super().__init__(message, reason)


class ForgedFrame(FrameError):
    def __init__(self, message: str) -> None:
        super().__init__(message, Reason.FORGED)


class CapabilityError(TransferError):
    pass


class PlanError(TransferError):
    pass


class WireError(TransferError):
    pass


class Unserved(TransferError):
    pass
