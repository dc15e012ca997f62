"""A pool in a directory of any mounted file system: local NVMe, NFS, a FUSE mount.

    <root>/generation                                        "hckv 1 <generation>"
    <root>/<generation>/runs/<tenant>/<2 hex>/<name>.hckv    mtime: what the run is worth
    <root>/<generation>/drafts/<writer>-<number>             runs being written
    <root>/<generation>/claims/<writer>-<number>-<bytes>     empty

There are no file locks. A run is written as a draft, synced, and linked under its name, which fails when the name is
taken (where there are no hard links it is renamed, and two writers of one run at the same moment both believe to have
been first: the index then counts one copy too many until somebody restates it). Directories are not synced: after a
power failure some runs may be gone, none half there.

All of it blocks, so all of it happens in threads of its own, which a mount that hangs cannot use up for others.
"""

import asyncio
import errno
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TypeVar

from cachecore.scope import TenantId
from cachecore.store.errors import StoreError, Unavailable
from cachecore.store.pools import hckv
from cachecore.store.pools.contract import Announce, Buffer, PoolBounds
from cachecore.store.pools.front import Gone
from cachecore.store.pools.gate import Gate
from cachecore.store.pools.ledger import Claim, Item, Listing
from cachecore.store.pools.shelf import (
    DEAD_SECONDS,
    GENERATION_RECORD,
    WRITE_BYTES_PER_SECOND_MIN,
    Full,
    Place,
    ShelfPool,
    Vanished,
)

T = TypeVar("T")

THREADS_MAX = 8
SWEEPS = 10
"""Budgets that a sweep may take: it looks at, and may delete, all there is."""
BUFFERS_MAX = 512
"""In one call of writev; systems take 1024."""

RUN_NAME = re.compile(r"[0-9a-f]{32}-[0-3]-[0-9a-f]{32}")
_CLAIM_NAME = re.compile(r"([0-9a-f]+)-(\d{1,12})-(\d{1,18})")
_GENERATION_NAME = re.compile(r"\d{1,18}")
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class DirectoryPool(ShelfPool):
    """`root` must be there: a mount that is missing must not be mistaken for an empty pool."""

    def __init__(
        self,
        name: str,
        root: Path,
        bounds: PoolBounds,
        announce: Announce = lambda announcement: None,
        *,
        budget_seconds: float = 5.0,
        dead_seconds: float = DEAD_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(
            name, DirectoryShelf(root, budget_seconds), bounds, announce, dead_seconds=dead_seconds, clock=clock
        )


class DirectoryShelf:
    """The Shelf of a directory; what it does is `_Files`', off the loop and within a budget."""

    def __init__(self, root: Path, budget_seconds: float) -> None:
        self._files = _Files(root)
        self._budget_seconds = budget_seconds
        self._gate = Gate(str(root))
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="pool")

    async def generation(self) -> int:
        return await self._run(self._files.generation)

    async def new_generation(self) -> int:
        return await self._run(self._files.new_generation, SWEEPS * self._budget_seconds)

    async def listing(self, generation: int) -> Listing:
        return await self._run(lambda: self._files.listing(generation))

    async def create(self, place: Place, encoded: hckv.Encoded) -> bool:
        abandoned = threading.Event()
        budget_seconds = self._budget_seconds + encoded.size / WRITE_BYTES_PER_SECOND_MIN
        try:
            return await self._run(lambda: self._files.create(place, encoded.buffers, abandoned), budget_seconds)
        except BaseException:
            abandoned.set()
            raise

    async def open(self, place: Place) -> "OpenedFile | None":
        found = await self._run(lambda: self._files.open(place))
        return OpenedFile(self, *found) if found else None

    async def read(self, handle: "_Handle", offset: int, size: int) -> Buffer:
        return await self._run(lambda: self._files.read(handle, offset, size))

    async def exists(self, place: Place) -> bool:
        return await self._run(lambda: self._files.exists(place))

    async def remove(self, place: Place) -> bool:
        return await self._run(lambda: self._files.remove(place))

    async def renew(self, place: Place, worth: Callable[[float], float]) -> None:
        await self._run(lambda: self._files.renew(place, worth))

    async def claim(self, generation: int, claim: Claim) -> None:
        await self._run(lambda: self._files.claim(generation, claim))

    async def release(self, generation: int, claim: Claim) -> None:
        await self._run(lambda: self._files.release(generation, claim))

    async def sweep(self, generation: int, dead_seconds: float) -> None:
        await self._run(lambda: self._files.sweep(generation, dead_seconds), SWEEPS * self._budget_seconds)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], T], budget_seconds: float | None = None) -> T:
        loop = asyncio.get_running_loop()

        async def ask() -> T:
            try:
                return await loop.run_in_executor(self._threads, work)
            except RuntimeError as error:  # the threads are gone
                raise StoreError(f"{self._files.root}: {error}") from None

        return await self._gate.ask(ask, self._budget_seconds if budget_seconds is None else budget_seconds)


class OpenedFile:
    """Of one writing, also when the name is removed or given to another."""

    def __init__(self, shelf: DirectoryShelf, handle: "_Handle", index: hckv.RunIndex) -> None:
        self._shelf = shelf
        self._handle = handle
        self.index = index

    async def read(self, offset: int, size: int) -> Buffer:
        return await self._shelf.read(self._handle, offset, size)

    async def close(self) -> None:
        self._handle.close()


class _Handle:
    """An open file. It is closed when nobody reads it any more, so that no late reader meets another file's number."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._lock = threading.Lock()
        self._users = 1
        self._closed = False
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        about = os.fstat(self._descriptor)
        self.size = about.st_size if stat.S_ISREG(about.st_mode) else 0

    def read(self, offset: int, size: int) -> bytes:
        """Less than `size` bytes at the end of the file. Raises OSError."""
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, "closed")
            self._users += 1
        try:
            return _read_fully(self._descriptor, offset, size)
        finally:
            self._leave()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._leave()

    def __del__(self) -> None:
        # Of an opening that nobody waited for.
        with suppress(AttributeError, OSError):
            self.close()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                os.close(self._descriptor)


class _Files:
    """Every method blocks, and raises StoreError where the file system raises OSError."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._writer = secrets.token_hex(8)
        self._numbers = count()
        self._device: int | None = None

    # Generations

    def generation(self) -> int:
        with self._translated():
            current = self._recorded()
            if current is None:
                self._check_empty()
                current = self._begin(os.link)
            self._device = os.stat(self.root).st_dev
            return current

    def new_generation(self) -> int:
        with self._translated():
            generation = self._begin(os.replace)
        self.sweep(generation, DEAD_SECONDS)
        return generation

    def _recorded(self) -> int | None:
        try:
            text = (self.root / "generation").read_bytes()
        except FileNotFoundError:
            self._require_root()
            return None
        record = GENERATION_RECORD.fullmatch(text[:64])
        if record is None:
            raise Unavailable(f"{self.root}: its file `generation` is not a pool's")
        return int(record[1])

    def _require_root(self) -> None:
        """A root that is missing is away, not empty. Raises OSError."""
        os.stat(self.root)

    def _check_empty(self) -> None:
        if self._device not in (None, os.stat(self.root).st_dev):
            raise Unavailable(f"{self.root}: what was mounted there is gone")
        others = [
            name for name in os.listdir(self.root) if name != "lost+found" and not _GENERATION_NAME.fullmatch(name)
        ]
        if others:
            raise Unavailable(f"{self.root}: neither a pool nor empty: it has {sorted(others)[0]!r}")

    def _begin(self, publish: Callable[[Path, Path], None]) -> int:
        """A new generation, larger than all that were; another one when somebody was faster."""
        old = [int(name) for name in os.listdir(self.root) if _GENERATION_NAME.fullmatch(name)]
        generation = max([time.time_ns() // 1000, *(number + 1 for number in old)])
        home = self.root / str(generation)
        for part in ("", "runs", "drafts", "claims"):
            (home / part).mkdir(mode=0o700, exist_ok=True)
        draft = home / "drafts" / "generation"
        draft.write_bytes(b"hckv 1 %d\n" % generation)
        try:
            self._publish(draft, self.root / "generation", publish)
        finally:
            draft.unlink(missing_ok=True)
        current = self._recorded()
        if current != generation:
            shutil.rmtree(home, ignore_errors=True)
        if current is None:
            raise Vanished(f"{self.root}: it was emptied meanwhile")
        return current

    def _publish(self, draft: Path, final: Path, publish: Callable[[Path, Path], None]) -> None:
        with suppress(FileExistsError):
            try:
                publish(draft, final)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                draft.replace(final)

    # Runs

    def listing(self, generation: int) -> Listing:
        home = self.root / str(generation)
        with self._translated():
            claims = [Claim(match[1], int(match[2]), int(match[3])) for _, match in self._claims(home)]
            return Listing(list(self._items(home)), claims)

    def create(self, place: Place, buffers: Sequence[Buffer], abandoned: threading.Event) -> bool:
        home = self.root / str(place.generation)
        draft = home / "drafts" / f"{self._writer}-{next(self._numbers)}"
        final = self._path(place)
        with self._translated():
            try:
                self._write(draft, buffers, abandoned)
                for directory in (final.parent.parent, final.parent):
                    directory.mkdir(mode=0o700, exist_ok=True)
                return self._link(draft, final)
            except FileNotFoundError:
                raise Vanished(f"{home}: it is gone") from None
            finally:
                with suppress(OSError):
                    draft.unlink(missing_ok=True)

    def _write(self, draft: Path, buffers: Sequence[Buffer], abandoned: threading.Event) -> None:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _write_fully(descriptor, buffers)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if abandoned.is_set():
            raise TimeoutError(errno.ETIMEDOUT, "given up")

    def _link(self, draft: Path, final: Path) -> bool:
        try:
            os.link(draft, final)
        except FileExistsError:
            return os.stat(draft).st_nlink == 2  # an answer of NFS that was lost: it was this very link
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if final.exists():
                return False
            draft.rename(final)
        return True

    def open(self, place: Place) -> tuple[_Handle, hckv.RunIndex] | None:
        with self._translated():
            try:
                handle = _Handle(self._path(place))
            except FileNotFoundError:
                self._require_root()
                return None
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise hckv.Broken("a symbolic link") from None
                raise
            try:
                return handle, _index(handle)
            except BaseException:
                handle.close()
                raise

    def read(self, handle: _Handle, offset: int, size: int) -> Buffer:
        with self._translated():
            try:
                return handle.read(offset, size)
            except OSError as error:
                if error.errno == errno.ESTALE:  # removed through another mount of NFS
                    raise Gone(f"{self.root}: the run was removed") from None
                raise

    def exists(self, place: Place) -> bool:
        with self._translated():
            try:
                os.stat(self._path(place))
            except FileNotFoundError:
                self._require_root()
                return False
            return True

    def remove(self, place: Place) -> bool:
        with self._translated():
            try:
                os.unlink(self._path(place))
            except FileNotFoundError:
                return False
            return True

    def renew(self, place: Place, worth: Callable[[float], float]) -> None:
        path = self._path(place)
        with self._translated(), suppress(FileNotFoundError):
            about = os.stat(path)
            os.utime(path, (about.st_atime, worth(about.st_mtime)))

    def _path(self, place: Place) -> Path:
        folder = place.name[-2:]
        return self.root / str(place.generation) / "runs" / place.tenant / folder / f"{place.name}.hckv"

    def _items(self, home: Path) -> Iterator[Item]:
        for tenant in _entries(home / "runs", vital=True):
            for folder in _entries(Path(tenant.path)):
                for entry in _entries(Path(folder.path)):
                    name, dot, ending = entry.name.partition(".")
                    if (dot, ending) == (".", "hckv") and RUN_NAME.fullmatch(name):
                        with suppress(FileNotFoundError):
                            about = entry.stat(follow_symlinks=False)
                            yield Item(name, TenantId(tenant.name), about.st_size, about.st_mtime)

    # Claims and what is left behind

    def claim(self, generation: int, claim: Claim) -> None:
        with self._translated():
            try:
                self._claim_path(generation, claim).touch(mode=0o600)
            except FileNotFoundError:
                raise Vanished(f"{self.root}: generation {generation} is gone") from None

    def release(self, generation: int, claim: Claim) -> None:
        with self._translated():
            self._claim_path(generation, claim).unlink(missing_ok=True)

    def sweep(self, generation: int, dead_seconds: float) -> None:
        home = self.root / str(generation)
        with self._translated():
            # The file system's own clock, which may be another machine's.
            mark = home / "drafts" / f"{self._writer}-{next(self._numbers)}"
            mark.touch(mode=0o600)
            now = mark.stat().st_mtime
            mark.unlink(missing_ok=True)
            left = [entry for entry, _ in self._claims(home)] + list(_entries(home / "drafts"))
            for entry in left:
                with suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_mtime < now - dead_seconds:
                        os.unlink(entry.path)
            current = self._recorded()
            for entry in _entries(self.root):
                if _GENERATION_NAME.fullmatch(entry.name) and current is not None and int(entry.name) < current:
                    shutil.rmtree(entry.path, ignore_errors=True)

    def _claims(self, home: Path) -> Iterator[tuple[os.DirEntry[str], re.Match[str]]]:
        for entry in _entries(home / "claims", vital=True):
            match = _CLAIM_NAME.fullmatch(entry.name)
            if match is not None:
                yield entry, match

    def _claim_path(self, generation: int, claim: Claim) -> Path:
        return self.root / str(generation) / "claims" / f"{claim.writer}-{claim.number}-{claim.bytes}"

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = f"{self.root}: {error.strerror or error}"
            raise (Full if error.errno in _NO_SPACE else Unavailable)(message) from None


def _index(handle: _Handle) -> hckv.RunIndex:
    """Raises Broken, and OSError."""
    if handle.size < hckv.TRAILER_BYTES:
        raise hckv.Broken("too short for an .hckv file, or no file at all")
    size = min(hckv.TAIL_GUESS_BYTES, handle.size)
    tail = handle.read(handle.size - size, size)
    trailer = hckv.read_trailer(tail, handle.size)
    if trailer.tail_bytes > len(tail):
        tail = handle.read(handle.size - trailer.tail_bytes, trailer.tail_bytes)
    return hckv.read_index(tail, trailer)


def _entries(directory: Path, vital: bool = False) -> Iterator[os.DirEntry[str]]:
    """Nothing for a directory that is not there any more; Vanished when nothing is without it."""
    try:
        with os.scandir(directory) as entries:
            yield from entries
    except NotADirectoryError:
        return
    except FileNotFoundError:
        if vital:
            raise Vanished(f"{directory}: it is gone") from None


def _read_fully(descriptor: int, offset: int, size: int) -> bytes:
    """With one call in nearly every case."""
    data = os.pread(descriptor, size, offset)
    while len(data) < size and (more := os.pread(descriptor, size - len(data), offset + len(data))):
        data += more
    return data


def _write_fully(descriptor: int, buffers: Iterable[Buffer]) -> None:
    waiting = [memoryview(buffer).cast("B") for buffer in buffers]
    waiting.reverse()
    while waiting:
        some = waiting[: -BUFFERS_MAX - 1 : -1]
        written = os.writev(descriptor, some)
        while waiting and written >= len(waiting[-1]):
            written -= len(waiting.pop())
        if written:
            waiting[-1] = waiting[-1][written:]
