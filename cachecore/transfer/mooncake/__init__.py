"""KV over Mooncake's transfer engine, over RDMA or TCP. The extra `mooncake`."""

from cachecore.transfer.mooncake.engine import MooncakeEngine

__all__ = ["MooncakeEngine"]
