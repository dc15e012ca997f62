"""What a simulated worker was asked, in a file that outlives it: for whoever must account for every request.

A JSON line when a request has been received whole, and another when it has ended, each written at once. The lines of a
life that was killed stay, and say what it had under way. Several workers, and their later lives, may share a file.
"""

import os
import time
from pathlib import Path
from typing import Literal

import msgspec


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the file. Times are wall-clock seconds."""

    event: Literal["received", "ended"]
    at: float
    worker: str
    """Where it listens."""
    epoch: int
    """Its life."""
    number: int
    """Of the request, within this life."""
    path: str
    request_id: str = ""
    """As the header says it."""
    cache_salt: str = ""
    """As the body says it."""
    status: int = 0
    """Of an answer that was begun; 0 for none."""
    sent_bytes: int = 0
    """Of the answer's body."""
    complete: bool = False
    """Whether the answer came to its end."""


read_entry = msgspec.json.Decoder(Entry).decode


class _Salted(msgspec.Struct):
    cache_salt: str | None = None


_read_salted = msgspec.json.Decoder(_Salted).decode


def salt_of(body: bytes) -> str:
    """The cache salt that a request names; empty when it names none, or is none."""
    try:
        return _read_salted(body).cache_salt or ""
    except msgspec.DecodeError:
        return ""


class AccessLog:
    """The file, for one life of one worker."""

    def __init__(self, path: Path, worker: str, epoch: int) -> None:
        """Raises OSError."""
        self._worker = worker
        self._epoch = epoch
        self._count = 0
        # Appended to without a buffer: a line is one write, and survives the process as soon as it is made.
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def received(self, path: str, request_id: str, body: bytes) -> int:
        """The number of the request, for `ended`."""
        self._count += 1
        self._write("received", self._count, path, request_id, cache_salt=salt_of(body))
        return self._count

    def ended(self, number: int, path: str, request_id: str, status: int, sent_bytes: int, complete: bool) -> None:
        self._write("ended", number, path, request_id, status=status, sent_bytes=sent_bytes, complete=complete)

    def close(self) -> None:
        """What ends after this is not written."""
        descriptor, self._file = self._file, None
        if descriptor is not None:
            os.close(descriptor)

    def _write(
        self, event: Literal["received", "ended"], number: int, path: str, request_id: str, **said: str | int | bool
    ) -> None:
        if self._file is None:
            return
        entry = Entry(event, time.time(), self._worker, self._epoch, number, path, request_id, **said)  # type: ignore[arg-type]
        os.write(self._file, msgspec.json.encode(entry) + b"\n")
