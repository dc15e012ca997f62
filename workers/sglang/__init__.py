"""SGLang's HiCache over our pools: pages of KV that outlive the server that computed them, and leave SGLang as it is.

    SGLang's threads ── hashes of pages ─► namespaces (a page's name in the pool: whose, of which model, which shard)
                     ── host memory ─────► memory (a page's bytes, as SGLang has laid them out)
                     ── both ────────────► store (a pool on a loop of its own: sealed, bounded, never an exception)

`hicache` is what SGLang loads by name, and the only module that imports it; all others run without.
"""
