"""The one place that speaks to Redis or Valkey, and the Valkey of our own."""

from cachecore.store.address import Address, parse_address
from cachecore.store.breaker import Breaker
from cachecore.store.connection import RedisStore, StoreHealth
from cachecore.store.embedded import EmbeddedValkey
from cachecore.store.errors import Refused, StoreError, Unavailable
from cachecore.store.script import Call, Script
from cachecore.store.streams import StreamEntry

__all__ = [
    "Address",
    "Breaker",
    "Call",
    "EmbeddedValkey",
    "RedisStore",
    "Refused",
    "Script",
    "StoreError",
    "StoreHealth",
    "StreamEntry",
    "Unavailable",
    "parse_address",
]
