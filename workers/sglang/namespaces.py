"""What a page is called in a pool, so that nobody ever reads another model's, layout's, shard's or tenant's.

SGLang names a page by a chain of SHA-256 over its tokens and all before them (salts and adapters included), which says
nothing of the model. So a page's `RunKey` is made of

* a class: a digest of the weights' name, of what the server was started with, of SGLang's version (which may lay pages
  out anew without a word), of the memory that pages are copied from and to, and of the shard;
* a scope: model, weights and page size, under the tenant's key;
* a tail: SGLang's name of the page, under the scope and the tenant's key. Nobody who lists the pool learns it, and who
  has no keyring can neither find a page nor make one up.

A class is SGLang's own: the KV of no other engine has it, and none reads this one's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, Protocol

from cachecore.blocks import Chain
from cachecore.scope import IdentityScope, Keyring, Naming, TenantId
from cachecore.store.pools import Extent, PoolRun, RunKey
from cachecore.transfer.header import FrameHeader, Span

KV = "kv"
"""The pool of a model's attention; others are beside it (`PoolName` of SGLang)."""
_SHARDED_ANYWAY = frozenset({"mamba"})
"""Pools of which each tensor parallel rank has its own part also where the KV itself is the same on all."""
_LAYOUT_FACTS = (
    "layout",
    "dtype",
    "page_size",
    "size_per_token",
    "layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "indexer_page_stride_size",
    "item_bytes",
    "storage_format_tag",
)
"""Of a host pool (`HostKVCache`), as far as it has them."""
_ONE = Extent(0, 1)
"""A page is stored whole: what part of the model it is, its class says."""


class Sharding(Protocol):
    """Of `HiCacheStorageConfig`."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    model_name: str | None


@dataclass(frozen=True, slots=True)
class Deployment:
    """All that a server's pages have in common."""

    sharding: Sharding
    weights: str
    tenant: TenantId
    version: str
    """Of SGLang."""
    started_with: Mapping[str, str]
    """What changes the KV of the same weights: dtype, quantization and the like."""

    def shard(self, pool_name: str) -> tuple[int, ...]:
        """Which part of a page this rank has. Ranks that have the same share it."""
        own = self.sharding
        replicated = own.is_mla_model and pool_name not in _SHARDED_ANYWAY
        tensor = (0, 1) if replicated else (own.tp_rank, own.tp_size)
        context = (own.attn_cp_rank, own.attn_cp_size, getattr(own, "dcp_rank", 0), getattr(own, "dcp_size", 1))
        return (*tensor, own.pp_rank, own.pp_size, *context)


def facts_of(host_pool: Any) -> dict[str, str]:
    """How a host pool lays a page out. The device's dtype counts, since the host's may be plain bytes for several."""
    facts = {name: str(getattr(host_pool, name, None)) for name in _LAYOUT_FACTS}
    device_pool = getattr(host_pool, "device_pool", None)
    return {**facts, "class": type(host_pool).__name__, "device_dtype": str(getattr(device_pool, "dtype", None))}


class Namespace:
    """Names the pages of one host pool of one rank."""

    def __init__(
        self, deployment: Deployment, keyring: Keyring, pool_name: str, facts: Mapping[str, str], page_size_tokens: int
    ) -> None:
        self._deployment = deployment
        self.pool_name = pool_name
        self._facts = facts
        model = deployment.sharding.model_name or ""
        key_id = keyring.key_id(deployment.tenant)
        scope = IdentityScope(model, key_id, page_size_tokens, revision=deployment.weights)
        self._naming = Naming.of(scope, keyring)
        self._dtype = _plain(facts.get("dtype", ""))

    def __repr__(self) -> str:
        return f"Namespace({self.pool_name}, class={self.compatibility.hex()})"

    @cached_property
    def compatibility(self) -> bytes:
        own, digest = self._deployment, blake2b(digest_size=16, person=b"ropeway.hicache")
        stated = {"weights": own.weights, "version": own.version, "pool": self.pool_name}
        shard = own.shard(self.pool_name)
        for part in (stated, own.started_with, self._facts):
            digest.update(repr(sorted(part.items())).encode())
        digest.update(repr((own.sharding.model_name, shard)).encode())
        return digest.digest()

    def run(self, page: str) -> PoolRun:
        """Of a page by SGLang's name for it. What stood before it is in that name, so nothing else says it."""
        naming = self._naming
        tail = naming.hasher.root(page.encode(), naming.root)
        key = RunKey(self.compatibility, naming.root, naming.scope.key_id, tail, 1, _ONE, _ONE, "raw")
        return PoolRun(key, naming.root, Chain(tail), 0)

    def header(self, run: PoolRun, page_bytes: int) -> FrameHeader:
        """Of the one frame that a page is sealed in, to which its bytes mean nothing: one layer, one head."""
        key = run.key
        return FrameHeader(
            compatibility=key.compatibility,
            scope=key.scope,
            key_id=key.key_id,
            parent=run.parent,
            tail=key.tail,
            first_block=0,
            blocks=1,
            block_size_tokens=self._naming.hasher.block_size_tokens,
            position=0,
            layers=Span.all(1),
            kv_heads=Span.all(1),
            head_dim=1,
            value_dim=0,
            dtype=self._dtype,
            codec=key.codec,
            fidelity=key.fidelity,
            layer_bytes=(page_bytes,),
        )


def _plain(dtype: str) -> str:
    """`torch.bfloat16` as headers have it."""
    return dtype.removeprefix("torch.").lower() or "bytes"
