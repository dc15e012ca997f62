"""The pages of one of SGLang's host pools: where they lie, what they are called, and their way into a pool and back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cachecore.scope import Keyring
from workers.sglang.memory import FlatTensor, Form, HostPages, memory_of, scatter
from workers.sglang.namespaces import Deployment, Namespace, facts_of
from workers.sglang.store import Page, PageStore, leading

ALL_PAGES, TRAILING_PAGES = "all_pages", "trailing_pages"


class PoolPages:
    """Of one host pool. Everything counts pages from the first up to the one that fails, as a prefix does."""

    def __init__(
        self, host_pool: Any, pool_name: str, deployment: Deployment, keyring: Keyring, store: PageStore, flat: bool
    ) -> None:
        """`flat`: SGLang moves this pool's pages as tensors."""
        self._memory = HostPages(host_pool, flat)
        self._store = store
        facts, size = facts_of(host_pool), self._memory.page_size_tokens

        def names(form: Form) -> Namespace:
            return Namespace(deployment, keyring, pool_name, {**facts, "form": form}, size)

        self._names = names(self._memory.form)
        self._flat_names = names(Form.FLAT)

    def __repr__(self) -> str:
        return f"PoolPages({self._names!r}, {self._memory!r})"

    @property
    def classes(self) -> frozenset[bytes]:
        return frozenset({self._names.compatibility, self._flat_names.compatibility})

    @property
    def is_logical(self) -> bool:
        """It has no memory, and so no page that could be missing."""
        return self._memory.form is Form.NONE

    def present(self, keys: Sequence[str]) -> int:
        return len(keys) if self.is_logical else self._store.present(self._runs(keys))

    def present_each(self, keys: Sequence[str]) -> list[bool]:
        return [True] * len(keys) if self.is_logical else self._store.present_each(self._runs(keys))

    def read(self, keys: Sequence[str], host_indices: Any) -> int:
        """Into the memory at `host_indices`, one for each token. Raises MemoryMismatch."""
        if self.is_logical or not keys:
            return len(keys)
        memory, places = self._memory, self._memory.places(len(keys), host_indices)
        size = memory.page_bytes(places[0])
        pages = [self._page(self._names, key, size) for key in keys]
        return self._store.load(pages, lambda number, payload: memory.fill(places[number], payload))

    def write(self, keys: Sequence[str], host_indices: Any) -> int:
        """Raises MemoryMismatch."""
        if self.is_logical or not keys:
            return len(keys)
        memory, places = self._memory, self._memory.places(len(keys), host_indices)
        size = memory.page_bytes(places[0])
        pages = [self._page(self._names, key, size) for key in keys]
        return self._store.save(pages, lambda number: memory.pieces(places[number]))

    def read_tensors(self, keys: Sequence[str], targets: Sequence[FlatTensor]) -> int:
        """Raises MemoryMismatch."""
        memories = [memory_of(target) for target in targets]
        pages = [self._page(self._flat_names, key, len(memory)) for key, memory in zip(keys, memories, strict=True)]
        return self._store.load(pages, lambda number, payload: scatter(payload, [memories[number]]))

    def write_tensors(self, keys: Sequence[str], values: Sequence[FlatTensor]) -> int:
        """Raises MemoryMismatch."""
        memories = [memory_of(value) for value in values]
        pages = [self._page(self._flat_names, key, len(memory)) for key, memory in zip(keys, memories, strict=True)]
        return self._store.save(pages, lambda number: [memories[number]])

    def _runs(self, keys: Sequence[str]) -> list[Any]:
        return [self._names.run(key) for key in keys]

    def _page(self, names: Namespace, key: str, size: int) -> Page:
        run = names.run(key)
        return Page(run, names.header(run, size))


@dataclass(frozen=True, slots=True)
class Beside:
    """A pool whose pages must be there beside those of the KV."""

    pages: PoolPages
    policy: str
    """`PoolHitPolicy`: which of them."""
    window: int
    """How many at the end, where only those count."""


@dataclass(frozen=True, slots=True)
class Usable:
    """What can be restored of a chain of pages, all pools together."""

    pages: int
    by_pool: Mapping[Any, int]
    """How many pages the longest prefix has as far as that pool is concerned; pools that have none are not in it."""
    lengths: list[int]
    """Of all prefixes that can be restored, ascending. There may be gaps where only the end of one is looked at."""


def usable(kv: PoolPages, kv_name: Any, keys: Sequence[str], beside: Mapping[Any, Beside]) -> Usable:
    found = kv.present(keys)
    by_pool = {kv_name: found} if found else {}
    lengths = set(range(1, found + 1))
    for name, other in beside.items():
        if not lengths:
            break
        there = other.pages.present_each(keys[:found])
        allowed = _RULES[other.policy](there, other.window) if other.policy in _RULES else set()
        if allowed:
            by_pool[name] = max(allowed)
        lengths &= allowed
    return Usable(max(lengths, default=0), by_pool, sorted(lengths))


def _all(there: Sequence[bool], _window: int) -> set[int]:
    return set(range(1, leading(there) + 1))


def _trailing(there: Sequence[bool], window: int) -> set[int]:
    return {end for end in range(1, len(there) + 1) if all(there[max(0, end - window) : end])}


_RULES: Mapping[str, Callable[[Sequence[bool], int], set[int]]] = {ALL_PAGES: _all, TRAILING_PAGES: _trailing}
"""Which lengths of a prefix a pool allows. By no other rule is a prefix known to be whole."""
