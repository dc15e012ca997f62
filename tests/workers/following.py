"""What a subscriber makes of a worker's event stream."""

from collections import Counter

from cachecore.events import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch

Prefix = tuple[str, str, tuple[int, ...]]
"""Salt, adapter, and all tokens up to the end of a block."""


class Follower:
    """Copies by handle, and the prompt that each handle stands for. Fails on a stream that contradicts itself."""

    def __init__(self) -> None:
        self.copies: Counter[int] = Counter()
        self.prefixes: dict[int, Prefix] = {}
        self.removed = 0
        """Copies, in all."""

    def take(self, payload: bytes) -> None:
        batch = decode_batch(payload)
        assert batch.malformed == 0
        for event in batch.events:
            match event:
                case BlockStored():
                    self.store(event)
                case BlockRemoved():
                    assert all(self.copies[handle] > 0 for handle in event.block_hashes)
                    self.copies -= Counter(event.block_hashes)
                    self.removed += len(event.block_hashes)
                case AllBlocksCleared():
                    self.copies.clear()

    def store(self, event: BlockStored) -> None:
        size = event.block_size
        assert len(event.token_ids) == len(event.block_hashes) * size
        if event.parent_block_hash is None:
            salt, adapter, tokens = event.cache_salt or "", event.lora_name or "", ()
        else:
            assert self.copies[event.parent_block_hash] > 0, "the parent is not held"
            salt, adapter, tokens = self.prefixes[event.parent_block_hash]
        for number, handle in enumerate(event.block_hashes):
            tokens = (*tokens, *event.token_ids[number * size : (number + 1) * size])
            known = self.prefixes.setdefault(handle, (salt, adapter, tokens))
            assert known == (salt, adapter, tokens), "one handle stands for two prompts"
            self.copies[handle] += 1

    def held(self) -> set[Prefix]:
        return {self.prefixes[handle] for handle in +self.copies}
