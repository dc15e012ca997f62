"""The engine's rotary embedding: `cachecore.kv`'s tables and rotation, so that what moves keys turns as it does."""

from cachecore.kv.rope import RopeRows, RopeTable, attention_factor, inverse_frequencies, rope_table, rotate
from cachecore.kv.variants import RopeConfig

__all__ = ["RopeConfig", "RopeRows", "RopeTable", "attention_factor", "inverse_frequencies", "rope_table", "rotate"]
