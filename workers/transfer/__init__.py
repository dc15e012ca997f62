"""A worker's KV on the move, whatever its engine: served to peers from where it lies, pulled into blocks of its own."""
