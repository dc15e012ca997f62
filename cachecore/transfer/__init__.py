"""KV on its way: frames, capabilities, plans, and what carries them. Knows no tensors."""
