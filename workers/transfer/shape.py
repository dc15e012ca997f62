"""What a worker's KV looks like to those that move it."""

from dataclasses import dataclass

from cachecore.transfer.header import Span
from cachecore.transfer.transport import Expectation


@dataclass(frozen=True, slots=True)
class KvShape:
    """Of one worker."""

    compatibility: bytes
    """16 bytes: who has the same reads the same numbers for the same tokens."""
    layers: int
    kv_heads: int
    head_dim: int
    block_size_tokens: int
    dtype: str

    def expectation(self, scope: bytes) -> Expectation:
        """What a pull into this worker asks for, for a chain with that root."""
        return Expectation(
            self.compatibility,
            scope,
            Span.all(self.layers),
            Span.all(self.kv_heads),
            self.head_dim,
            self.head_dim,
            self.block_size_tokens,
            self.dtype,
        )
