"""Files and batches on disk, each tenant's apart.

    <directory>/lock
    <directory>/t-<tenant>/files/<id>.json         what is said of a file
    <directory>/t-<tenant>/files/<id>.jsonl        what is in it
    <directory>/t-<tenant>/batches/<id>.json       a batch; written by whoever made it, then by the one who runs it
    <directory>/t-<tenant>/batches/<id>.cancel     its tenant wants no more of it
    <directory>/t-<tenant>/batches/<id>.output     lines that are answered, <id>.errors: those that were refused

Documents are replaced as a whole, lines are only added; what a crash leaves of a line is cut off by the next who runs
the batch, and its request is made again. Several gateways may serve one directory; who has the lock runs the batches.
Everything here blocks: callers use a thread.
"""

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import orjson

from gateway.config import BatchesConfig
from gateway.errors import BadRequest, NotFound, PayloadTooLarge

Document = dict[str, Any]

FILES_MAX = 10_000
"""Of one tenant."""
_ID = re.compile(r"(?:file|batch)-[0-9a-f]{24}|batch_[0-9a-f]{24}").fullmatch
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})


class Key(NamedTuple):
    """A batch of a tenant."""

    tenant: str
    id: str


class Shelf:
    def __init__(self, directory: Path, config: BatchesConfig) -> None:
        self.config = config
        self._directory = directory
        self._lock: int | None = None
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    # Who runs the batches

    def lock(self) -> bool:
        """Whether this gateway is the one, from now until it is gone."""
        if self._lock is None:
            descriptor = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                return False
            self._lock = descriptor
        return True

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # Files

    def add_file(self, tenant: str, filename: str, purpose: str, content: bytes, now: float) -> Document:
        """Raises PayloadTooLarge where there is no more room."""
        if len(content) > self.config.file_bytes_max:
            raise PayloadTooLarge(self.config.file_bytes_max)
        self.require_room(len(content))
        folder = self._folder(tenant, "files")
        if sum(1 for _ in folder.glob("*.json")) >= FILES_MAX:
            raise BadRequest(f"There are {FILES_MAX} files already: delete some.")
        identifier = f"file-{secrets.token_hex(12)}"
        _write(folder / f"{identifier}.jsonl", content)
        return self._say(folder, identifier, filename, purpose, now)

    def take_file(self, tenant: str, lines: Path, filename: str, now: float) -> str | None:
        """A batch's lines as a file of their own, by its id; None where there are none."""
        if not lines.exists() or not lines.stat().st_size:
            lines.unlink(missing_ok=True)
            return None
        folder = self._folder(tenant, "files")
        identifier = f"file-{secrets.token_hex(12)}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lines.replace(folder / f"{identifier}.jsonl")
        self._say(folder, identifier, filename, "batch_output", now)
        return identifier

    def _say(self, folder: Path, identifier: str, filename: str, purpose: str, now: float) -> Document:
        document = {
            "id": identifier,
            "object": "file",
            "bytes": (folder / f"{identifier}.jsonl").stat().st_size,
            "created_at": int(now),
            "expires_at": int(now + self.config.keep_seconds),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
        }
        _write(folder / f"{identifier}.json", orjson.dumps(document))
        return document

    def file(self, tenant: str, identifier: str) -> Document:
        """Raises NotFound."""
        return _read(self._path(tenant, "files", identifier, "json"), identifier)

    def files(self, tenant: str) -> list[Document]:
        return _listed(self._folder(tenant, "files"))

    def content(self, tenant: str, identifier: str) -> Path:
        """Raises NotFound."""
        path = self._path(tenant, "files", identifier, "jsonl")
        if not path.exists():
            raise NotFound(f"there is no file {identifier!r}")
        return path

    def delete_file(self, tenant: str, identifier: str) -> None:
        """Raises NotFound."""
        self.file(tenant, identifier)
        for ending in ("json", "jsonl"):
            self._path(tenant, "files", identifier, ending).unlink(missing_ok=True)

    def require_room(self, more_bytes: int) -> None:
        """Raises PayloadTooLarge where so much more is more than may lie here."""
        if self.used_bytes() + more_bytes > self.config.bytes_max:
            raise PayloadTooLarge(self.config.bytes_max)

    def used_bytes(self) -> int:
        return sum(entry.stat().st_size for entry in self._directory.rglob("*") if entry.is_file())

    # Batches

    def add_batch(self, tenant: str, document: Document) -> Document:
        document = {"id": f"batch_{secrets.token_hex(12)}", **document}
        self.save(Key(tenant, document["id"]), document)
        return document

    def save(self, key: Key, document: Document) -> None:
        _write(self._folder(key.tenant, "batches") / f"{key.id}.json", orjson.dumps(document))

    def batch(self, key: Key) -> Document:
        """Raises NotFound."""
        document = _read(self._path(key.tenant, "batches", key.id, "json"), key.id)
        return {**document, "status": "cancelling"} if self._cancels(key, document) else document

    def batches(self, tenant: str) -> list[Document]:
        documents = _listed(self._folder(tenant, "batches"))
        return [self.batch(Key(tenant, document["id"])) for document in documents]

    def cancel(self, key: Key) -> None:
        _write(self._path(key.tenant, "batches", key.id, "cancel"), b"")

    def cancelled(self, key: Key) -> bool:
        return self._path(key.tenant, "batches", key.id, "cancel").exists()

    def _cancels(self, key: Key, document: Document) -> bool:
        return document["status"] not in ENDED and self.cancelled(key)

    def open_batches(self) -> list[Key]:
        """Those that have not ended, the oldest first."""
        found: list[tuple[int, Key]] = []
        for path in self._directory.glob("t-*/batches/*.json"):
            document = _read(path, path.stem)
            if document["status"] not in ENDED:
                found.append((document["created_at"], Key(unquote(path.parts[-3][2:]), path.stem)))
        return [key for _, key in sorted(found)]

    def lines(self, key: Key, kind: str) -> Path:
        """Where a batch's answers (`output`) or refusals (`errors`) are collected."""
        return self._path(key.tenant, "batches", key.id, kind)

    def recovered(self, key: Key) -> dict[str, set[str]]:
        """The `custom_id`s of the lines that were written, by kind; half a line at the end is cut off."""
        found: dict[str, set[str]] = {}
        for kind in ("output", "errors"):
            path = self.lines(key, kind)
            found[kind] = set()
            if path.exists():
                whole = path.read_bytes()
                sound = whole.rfind(b"\n") + 1
                if sound < len(whole):
                    os.truncate(path, sound)
                found[kind] = {orjson.loads(line)["custom_id"] for line in whole[:sound].splitlines()}
        return found

    def append(self, key: Key, kind: str, line: bytes) -> None:
        with self.lines(key, kind).open("ab") as file:
            file.write(line)

    def forget_old(self, now: float) -> None:
        """Files and batches whose time is over."""
        for path in list(self._directory.glob("t-*/*/*.json")):
            document = _read(path, path.stem)
            ended = path.parent.name == "files" or document["status"] in ENDED
            if ended and document["created_at"] + self.config.keep_seconds < now:
                for sibling in path.parent.glob(f"{path.stem}.*"):
                    sibling.unlink(missing_ok=True)

    # Paths

    def _folder(self, tenant: str, kind: str) -> Path:
        return self._directory / f"t-{quote(tenant, safe='')}" / kind

    def _path(self, tenant: str, kind: str, identifier: str, ending: str) -> Path:
        """Raises NotFound for what is no id: it comes from a client."""
        if not _ID(identifier):
            raise NotFound(f"there is no {kind.removesuffix('s').removesuffix('e')} {identifier!r}")
        return self._folder(tenant, kind) / f"{identifier}.{ending}"


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that say something, with their numbers."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


def _write(path: Path, content: bytes) -> None:
    """As a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_suffix(f".{secrets.token_hex(4)}.draft")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    draft.replace(path)


def _read(path: Path, identifier: str) -> Document:
    try:
        document: Document = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise NotFound(f"there is no {identifier!r}") from None
    return document


def _listed(folder: Path) -> list[Document]:
    """The newest first."""
    documents = [_read(path, path.stem) for path in folder.glob("*.json")]
    return sorted(documents, key=lambda document: (document["created_at"], document["id"]), reverse=True)
