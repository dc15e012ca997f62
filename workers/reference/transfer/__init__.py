"""The reference worker's KV on the move: served to peers from where it lies, and pulled into blocks of its own."""
