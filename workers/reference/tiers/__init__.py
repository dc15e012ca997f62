"""The tiers beyond the engine's own memory: host memory of the worker (L1), and pools that all workers share (L2)."""
