"""vLLM's KV on the move: a connector that vLLM loads by name, and that leaves vLLM as it is.

    scheduler's process                              worker's process
    plans ─► requests (what is loaded, by whom) ─┐   ┌─► index (which block is which) ─► serving peers
    requests' own tokens ─► names of its blocks ─┴ orders, every step ─┴─► loads into blocks, layer by layer
                                                                       └─► reports ─► (sidecar) ─► answers

`connector` is what vLLM calls, and the only module that imports it; all others run without.
"""
