"""KV over NIXL: RDMA, shared memory or TCP, whatever UCX finds between two workers. The extra `nixl`."""

from cachecore.transfer.nixl.engine import NixlEngine

__all__ = ["NixlEngine"]
