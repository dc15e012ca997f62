"""KV event streams kept in files: recorded from a live engine, played back later, golden in tests.

A capture is one JSON document a line, so that it can be read, cut and compared with ordinary tools:

    {"format":"ropeway-kv-events","version":1,"captured_at":1780041600.25,"endpoint":"tcp://...","note":"..."}
    {"at":0.0,"topic":"kv-events","sequence":0,"payload":"k8tB2f...","replayed":true}
    {"at":0.731,"topic":"kv-events","sequence":1,"payload":"k8tB2g..."}

The first line is the header. Each line after it is one message as it came over the wire: `payload` is the third frame,
in base64, undecoded; `at` is seconds after `captured_at`; `replayed` marks what a replay socket brought. One file holds
one stream. Messages stand in the order in which a follower takes them: what was replayed, then what came live, with
whatever gaps, repetitions and restarts there were.

Reading is strict, unlike decoding: a file that is not whole says so, with the line at fault.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, BinaryIO, Final, Literal, Self

import msgspec
from msgspec import Meta

VERSION: Final = 1
LINE_BYTES_MAX: Final = 96 * 2**20
"""A payload of 64 MiB in base64, and the fields beside it."""

_FORMAT: Final = "ropeway-kv-events"


class CaptureError(ValueError):
    """A file that is no capture, or not a whole one. The message names the file and the line."""


class CaptureHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a capture says of itself. Further keys are ignored."""

    format: Literal["ropeway-kv-events"]
    version: int
    captured_at: float
    """Wall-clock seconds at which `at` is 0."""
    endpoint: str = ""
    """Where the stream came from."""
    note: str = ""
    """For whoever reads the file: engine, version, what was asked of it."""

    @classmethod
    def new(cls, captured_at: float, endpoint: str = "", note: str = "") -> "CaptureHeader":
        return cls(format=_FORMAT, version=VERSION, captured_at=captured_at, endpoint=endpoint, note=note)


class CapturedMessage(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One message of a stream."""

    at: Annotated[float, Meta(ge=0)]
    """Seconds after the header's `captured_at`."""
    topic: str
    sequence: Annotated[int, Meta(ge=0)]
    payload: bytes
    replayed: bool = False


class CaptureWriter:
    """Writes a new file, a line at a time. Raises FileExistsError rather than replace one."""

    def __init__(self, path: Path, header: CaptureHeader) -> None:
        self._file: BinaryIO = path.open("xb")
        self._encode = msgspec.json.Encoder().encode
        self.messages = 0
        self.bytes = 0
        """Written so far, the header included."""
        self._write(header)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._file.close()

    def add(self, message: CapturedMessage) -> None:
        self._write(message)
        self.messages += 1

    def _write(self, document: msgspec.Struct) -> None:
        self.bytes += self._file.write(self._encode(document) + b"\n")
        self._file.flush()  # whoever is killed leaves whole lines


class Capture:
    """A capture in a file, read a line at a time: iterate as often as wanted.

    Raises CaptureError, when it is opened for what is no capture, and while it is read for what is broken; OSError for
    a file that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self.header = self._header(file.readline(LINE_BYTES_MAX))

    def __iter__(self) -> Iterator[CapturedMessage]:
        decode = msgspec.json.Decoder(CapturedMessage).decode
        with self.path.open("rb") as file:
            file.readline(LINE_BYTES_MAX)
            for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES_MAX), b""), start=2):
                if not line.endswith(b"\n"):
                    raise CaptureError(f"{self.path}:{number}: the last line is not whole")
                yield self._decoded(decode, line, number)

    def _header(self, line: bytes) -> CaptureHeader:
        try:
            header = msgspec.json.decode(line, type=CaptureHeader)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise CaptureError(f"{self.path}: this is no capture of KV events") from None
        if header.version != VERSION:
            raise CaptureError(f"{self.path}: version {header.version} is not known here, only {VERSION} is")
        return header

    def _decoded(self, decode: Any, line: bytes, number: int) -> CapturedMessage:
        try:
            message: CapturedMessage = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CaptureError(f"{self.path}:{number}: {error}") from None
        if message.sequence >= 2**64:
            raise CaptureError(f"{self.path}:{number}: a sequence number has 64 bits")
        return message


def write_capture(path: Path, header: CaptureHeader, messages: Iterable[CapturedMessage]) -> None:
    """A whole capture at once. Raises FileExistsError rather than replace one."""
    with CaptureWriter(path, header) as writer:
        for message in messages:
            writer.add(message)
