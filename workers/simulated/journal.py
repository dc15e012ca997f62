"""KV events out of the cache's journal, as each engine words them."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from cachecore.blocks import PrefixHash
from cachecore.events import AllBlocksCleared, BlockRemoved, BlockStored, Dialect, KvEvent
from workers.simulated.cache import Emptied, Evicted, JournalEntry, NamedRun


def handle_of(name: PrefixHash) -> int:
    """The 64-bit number that stands for a block in events: the low end of its digest, as in vLLM."""
    return int.from_bytes(name[-8:], "big")


def kv_events(journal: Sequence[JournalEntry], dialect: Dialect, block_size_tokens: int) -> tuple[KvEvent, ...]:
    """vLLM removes block by block, SGLang in one event what went in one go."""
    vllm = dialect is not Dialect.SGLANG
    events: list[KvEvent] = []
    for kind, entries in groupby(journal, type):
        if kind is Evicted and not vllm:
            events.append(_removed(entries, vllm))
        else:
            events += (_event(entry, vllm, block_size_tokens) for entry in entries)
    return tuple(events)


def _event(entry: JournalEntry, vllm: bool, block_size_tokens: int) -> KvEvent:
    match entry:
        case NamedRun():
            return _stored(entry, vllm, block_size_tokens)
        case Evicted():
            return _removed((entry,), vllm)
        case Emptied():
            return AllBlocksCleared()


def _stored(run: NamedRun, vllm: bool, block_size_tokens: int) -> BlockStored:
    return BlockStored(
        block_hashes=tuple(map(handle_of, run.names)),
        parent_block_hash=None if run.parent is None else handle_of(run.parent),
        token_ids=run.token_ids,
        block_size=block_size_tokens,
        lora_name=run.adapter or None,
        cache_salt=run.cache_salt or None,
        group_idx=0 if vllm else None,
        kv_cache_spec_kind="full_attention" if vllm else None,
    )


def _removed(entries: Iterable[JournalEntry], vllm: bool) -> BlockRemoved:
    return BlockRemoved(tuple(_handles(entries)), group_idx=0 if vllm else None)


def _handles(entries: Iterable[JournalEntry]) -> Iterator[int]:
    for entry in entries:
        if isinstance(entry, Evicted):
            yield handle_of(entry.name)
