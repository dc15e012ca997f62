"""A pool in a bucket of any store that speaks S3, through obstore (extra `s3`).

    <prefix>/generation                                  "hckv 1 <generation>"
    <prefix>/<generation>/runs/<tenant>/<name>.hckv
    <prefix>/<generation>/used/<tenant>/<name>           when it was last read: see below
    <prefix>/<generation>/claims/<writer>-<number>-<bytes>

An object appears whole and at once, and is created only where there is none (`If-None-Match: *`); where a store does
not know that condition, two writers of one run may both believe to have been first. Removing does not tell whether
there was something: two removers at one moment both announce it, which the index counts and ignores.

An object's age cannot be changed, so what a run is worth is the age of a tiny object beside it, written when the run is
read (once in a credit's time, not each time), whose size is the number of credits. Claims and dead writers go by the
store's clock, which is the listing's.
"""

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from cachecore.scope import TenantId
from cachecore.store.errors import StoreError, Unavailable
from cachecore.store.pools import hckv
from cachecore.store.pools.contract import CREDITS_MAX, Announce, Buffer, PoolBounds
from cachecore.store.pools.front import Gone
from cachecore.store.pools.gate import Gate
from cachecore.store.pools.ledger import Claim, Item, Listing
from cachecore.store.pools.shelf import (
    DEAD_SECONDS,
    GENERATION_RECORD,
    WRITE_BYTES_PER_SECOND_MIN,
    Place,
    ShelfPool,
    Vanished,
)

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, S3Store

T = TypeVar("T")

SWEEPS = 10
"""Budgets that looking at, or deleting, all there is may take."""
LISTED_TOGETHER = 1000
DELETED_TOGETHER = 500
WORTHS_MAX = 100_000

_RUN = re.compile(r"runs/([A-Za-z0-9_-]{1,64})/([0-9a-f]{32}-[0-3]-[0-9a-f]{32})\.hckv")
_USED = re.compile(r"used/([A-Za-z0-9_-]{1,64})/([0-9a-f]{32}-[0-3]-[0-9a-f]{32})")
_CLAIM = re.compile(r"claims/([0-9a-f]+)-(\d{1,12})-(\d{1,18})")
_SERVER_ERROR = re.compile(r"<Code>([^<]{1,100})</Code>\s*<Message>([^<]{1,200})</Message>")
_RECORD_PATH = "generation"
_RECORD_BYTES_MAX = 64


@dataclass(frozen=True)
class Bucket:
    """Where the objects lie and who asks. What is left empty comes from the environment, as for other S3 clients."""

    name: str
    prefix: str = ""
    endpoint: str = ""
    """https://host:port of a store other than Amazon's, or http:// without TLS."""
    region: str = ""
    access_key_id: str = ""
    secret_access_key: str = field(default="", repr=False)
    ca: str = ""
    """A file in PEM, by which the store's certificate is believed as well as by what the system trusts."""

    def connect(self, budget_seconds: float) -> "S3Store":
        """Raises StoreError when obstore is not installed, or the settings make no sense to it."""
        try:
            from obstore.store import S3Store
        except ImportError:
            raise StoreError("a pool in a bucket needs the package obstore: pip install 'ropeway[s3]'") from None
        given = {
            "endpoint": self.endpoint,
            "region": self.region,
            "access_key_id": self.access_key_id,
            "secret_access_key": self.secret_access_key,
        }
        options = self._client_options(budget := timedelta(seconds=budget_seconds))
        try:
            return S3Store(
                self.name,
                prefix=self.prefix or None,
                client_options=options,
                retry_config={"max_retries": 2, "retry_timeout": budget},
                **{key: value for key, value in given.items() if value},  # type: ignore[arg-type]
            )
        except Exception as error:  # obstore's own hierarchy is as large as its list of settings
            raise StoreError(f"bucket {self.name}: {_reason(error)}") from None

    def _client_options(self, budget: timedelta) -> "ClientConfig":
        """Raises StoreError."""
        options: ClientConfig = {"allow_http": self.endpoint.startswith("http://"), "connect_timeout": budget}
        if self.ca:
            try:
                options["root_certificate"] = Path(self.ca).read_bytes()
            except OSError as error:
                raise StoreError(f"bucket {self.name}: cannot read {self.ca}: {error.strerror}") from None
        return options


class BucketPool(ShelfPool):
    """Raises StoreError when it cannot even be tried (see Bucket.connect)."""

    def __init__(
        self,
        name: str,
        bucket: Bucket,
        bounds: PoolBounds,
        announce: Announce = lambda announcement: None,
        *,
        budget_seconds: float = 10.0,
        dead_seconds: float = DEAD_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        shelf = BucketShelf(bucket, budget_seconds, bounds.reuse_credit_seconds, clock)
        super().__init__(name, shelf, bounds, announce, dead_seconds=dead_seconds, clock=clock)


class BucketShelf:
    def __init__(
        self, bucket: Bucket, budget_seconds: float, credit_seconds: float, clock: Callable[[], float] = time.time
    ) -> None:
        self.name = f"bucket {bucket.name}"
        self._store = bucket.connect(budget_seconds)
        self._budget_seconds = budget_seconds
        self._credit_seconds = credit_seconds
        self._clock = clock
        self._gate = Gate(self.name)
        self._worths: dict[Place, float] = {}
        """Of runs that were read, as last written or listed."""
        self._renewed: dict[Place, float] = {}
        """When."""

    # Generations

    async def generation(self) -> int:
        current = await self._recorded()
        if current is None:
            await self._put(_RECORD_PATH, _record(time.time_ns() // 1000), new=True)
            current = await self._recorded()
        if current is None:
            raise Vanished(f"{self.name}: it was emptied meanwhile")
        return current

    async def new_generation(self) -> int:
        generation = max(time.time_ns() // 1000, (await self._recorded() or 0) + 1)
        await self._put(_RECORD_PATH, _record(generation))
        await self._drop_before(generation)
        return generation

    async def _recorded(self) -> int | None:
        try:
            found = await self._ask(lambda: self._read(_RECORD_PATH, {"range": (0, _RECORD_BYTES_MAX)}))
        except FileNotFoundError:
            return None
        record = GENERATION_RECORD.fullmatch(bytes(found.data))
        if record is None:
            raise Unavailable(f"{self.name}: its object `generation` is not a pool's")
        return int(record[1])

    async def _check(self, generation: int) -> None:
        if await self._recorded() != generation:
            raise Vanished(f"{self.name}: generation {generation} is over")

    # Runs

    async def listing(self, generation: int) -> Listing:
        await self._check(generation)
        sizes: dict[Place, tuple[int, float]] = {}
        used: dict[Place, float] = {}
        claims = []
        async for path, meta in self._listed(str(generation)):
            time_of = meta["last_modified"].timestamp()
            if match := _RUN.fullmatch(path):
                sizes[Place(generation, TenantId(match[1]), match[2])] = meta["size"], time_of
            elif match := _USED.fullmatch(path):
                credits = min(meta["size"], CREDITS_MAX)
                used[Place(generation, TenantId(match[1]), match[2])] = time_of + credits * self._credit_seconds
            elif match := _CLAIM.fullmatch(path):
                claims.append(Claim(match[1], int(match[2]), int(match[3])))
        self._worths = used
        items = [
            Item(place.name, place.tenant, size, max(time_of, used.get(place, 0.0)))
            for place, (size, time_of) in sizes.items()
        ]
        return Listing(items, claims)

    async def create(self, place: Place, encoded: hckv.Encoded) -> bool:
        await self._check(place.generation)
        return await self._put(_run_path(place), encoded.buffers, new=True, size=encoded.size)

    async def open(self, place: Place) -> "OpenedObject | None":
        path = _run_path(place)
        try:
            found = await self._read_tail(path, hckv.TAIL_GUESS_BYTES)
            trailer = hckv.read_trailer(found.data, found.size)
            if trailer.tail_bytes > len(found.data):
                found = await self._read_tail(path, trailer.tail_bytes)
        except FileNotFoundError:
            return None
        return OpenedObject(self, path, found.tag, hckv.read_index(found.data, trailer))

    async def read(self, path: str, tag: str | None, offset: int, size: int) -> Buffer:
        options: dict[str, object] = {"range": (offset, offset + size), **({"if_match": tag} if tag else {})}
        try:
            return (await self._ask(lambda: self._read(path, options))).data
        except FileNotFoundError:
            raise Gone(f"{self.name}: the run was removed") from None

    async def exists(self, place: Place) -> bool:
        try:
            await self._ask(lambda: self._store.head_async(_run_path(place)))
        except FileNotFoundError:
            return False
        return True

    async def remove(self, place: Place) -> bool:
        await self._delete(_run_path(place))
        await self._delete(_used_path(place))
        return True

    async def renew(self, place: Place, worth: Callable[[float], float]) -> None:
        now = self._clock()
        if now - self._renewed.get(place, 0.0) < self._credit_seconds / 2:
            return
        if len(self._renewed) >= WORTHS_MAX:
            self._renewed.clear()
        self._renewed[place] = now
        self._worths[place] = worth(self._worths.get(place, 0.0))
        credits = round((self._worths[place] - now) / self._credit_seconds)
        await self._put(_used_path(place), [bytes(max(credits, 0))])

    # Claims and what is left behind

    async def claim(self, generation: int, claim: Claim) -> None:
        await self._put(_claim_path(generation, claim), [b""])

    async def release(self, generation: int, claim: Claim) -> None:
        await self._delete(_claim_path(generation, claim))

    async def sweep(self, generation: int, dead_seconds: float) -> None:
        mark = f"{generation}/sweep"
        await self._put(mark, [b""])
        now = (await self._ask(lambda: self._store.head_async(mark)))["last_modified"].timestamp()
        runs, left = set(), []
        async for path, meta in self._listed(str(generation)):
            if match := _RUN.fullmatch(path):
                runs.add(match.groups())
            elif meta["last_modified"].timestamp() < now - dead_seconds:
                left.append(path)
        kept = {path for path in left if (match := _USED.fullmatch(path)) and match.groups() in runs}
        await self._delete(*(f"{generation}/{path}" for path in left if path not in kept))
        current = await self._recorded()
        if current is not None:
            await self._drop_before(current)

    async def _drop_before(self, generation: int) -> None:
        found = await self._ask(self._store.list_with_delimiter_async, SWEEPS)
        for prefix in found["common_prefixes"]:
            number = prefix.strip("/").rpartition("/")[2]
            if number.isdecimal() and int(number) < generation:
                await self._delete(*[f"{number}/{path}" async for path, _ in self._listed(number)])

    async def close(self) -> None:
        pass

    # Requests

    async def _read_tail(self, path: str, size: int) -> "_Found":
        """Raises Broken for an object that is too small to be asked for its end."""
        try:
            return await self._ask(lambda: self._read(path, {"range": {"suffix": size}}))
        except Unavailable:
            about = await self._ask(lambda: self._store.head_async(path))
            if about["size"] < hckv.TRAILER_BYTES:
                raise hckv.Broken(f"an object of {about['size']} bytes") from None
            raise

    async def _read(self, path: str, options: dict[str, object]) -> "_Found":
        answer = await self._store.get_async(path, options=options)  # type: ignore[arg-type]
        data = memoryview(await answer.bytes_async())
        return _Found(data, answer.meta["size"], answer.meta["e_tag"])

    async def _put(self, path: str, buffers: Sequence[Buffer], new: bool = False, size: int = 0) -> bool:
        from obstore.exceptions import AlreadyExistsError

        budget = 1 + size / WRITE_BYTES_PER_SECOND_MIN / self._budget_seconds
        mode: Literal["create", "overwrite"] = "create" if new else "overwrite"
        try:
            await self._ask(lambda: self._store.put_async(path, buffers, mode=mode, use_multipart=False), budget)
        except AlreadyExistsError:
            return False
        except FileNotFoundError as error:  # of the bucket itself
            raise Unavailable(f"{self.name}: {_reason(error)}") from None
        return True

    async def _delete(self, *paths: str) -> None:
        for start in range(0, len(paths), DELETED_TOGETHER):
            some = paths[start : start + DELETED_TOGETHER]
            await self._ask(lambda some=some: self._store.delete_async(some[0] if len(some) == 1 else list(some)))  # type: ignore[misc]

    async def _listed(self, prefix: str) -> AsyncIterator[tuple[str, "ObjectMeta"]]:
        """All below the prefix, by their paths from there on."""
        pages = self._store.list(prefix, chunk_size=LISTED_TOGETHER)
        while page := await self._ask(lambda: _next_page(pages)):
            for meta in page:
                yield meta["path"].removeprefix(f"{prefix}/"), meta

    async def _ask(self, question: Callable[[], Awaitable[T]], budgets: float = 1.0) -> T:
        """Raises FileNotFoundError, AlreadyExistsError, Gone when an object is another one, and Unavailable."""
        return await self._gate.ask(lambda: self._translated(question), budgets * self._budget_seconds)

    async def _translated(self, question: Callable[[], Awaitable[T]]) -> T:
        from obstore import exceptions

        try:
            return await question()
        except (FileNotFoundError, exceptions.AlreadyExistsError, TimeoutError, StopAsyncIteration):
            raise
        except exceptions.PreconditionError:
            raise Gone(f"{self.name}: the run was replaced") from None
        except (exceptions.BaseError, OSError, ValueError, NotImplementedError) as error:
            raise Unavailable(f"{self.name}: {_reason(error)}") from None


class OpenedObject:
    """Of one writing: reads ask for the object that was opened, by its tag."""

    def __init__(self, shelf: BucketShelf, path: str, tag: str | None, index: hckv.RunIndex) -> None:
        self._shelf = shelf
        self._path = path
        self._tag = tag
        self.index = index

    async def read(self, offset: int, size: int) -> Buffer:
        return await self._shelf.read(self._path, self._tag, offset, size)

    async def close(self) -> None:
        pass


@dataclass(frozen=True)
class _Found:
    data: memoryview
    size: int
    """Of the whole object."""
    tag: str | None


async def _next_page(pages: "AsyncIterator[Sequence[ObjectMeta]]") -> "Sequence[ObjectMeta]":
    """Empty after the last."""
    async for page in pages:
        return page
    return ()


def _record(generation: int) -> list[Buffer]:
    return [b"hckv 1 %d\n" % generation]


def _run_path(place: Place) -> str:
    return f"{place.generation}/runs/{place.tenant}/{place.name}.hckv"


def _used_path(place: Place) -> str:
    return f"{place.generation}/used/{place.tenant}/{place.name}"


def _claim_path(generation: int, claim: Claim) -> str:
    return f"{generation}/claims/{claim.writer}-{claim.number}-{claim.bytes}"


def _reason(error: Exception) -> str:
    """What the server said, or else the first line: the others are the library's account of itself."""
    told = _SERVER_ERROR.search(str(error))
    return f"{told[1]}: {told[2]}" if told else str(error).partition("\n")[0][:300]
