"""A multiset of chains per key: who is believed to hold which prefix, from whole chains that come and go.

The index proper counts blocks, because engines announce blocks. Beliefs (predicted insertions, routing history) are
whole chains from block 0, stored and taken back as they were, so a compressed trie that counts chains per node is
enough: each call costs the nodes on its path, however long they are.

A node is a run of blocks that every chain through it shares. Names are chained (see `cachecore.blocks`), so a node is
found by the name of its first block alone, and its last name confirms all of it.
"""

from collections.abc import Mapping

from cachecore.blocks import HASH_BYTES

Key = tuple[str, int]


class _Node:
    __slots__ = ("counts", "names")

    def __init__(self, names: bytes, counts: dict[Key, int]) -> None:
        self.names = names
        self.counts = counts


class ChainMultiset:
    """Implements `policies.state.chains.ChainStore`."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, _Node] = {}

    def __len__(self) -> int:
        """Distinct blocks held by anyone."""
        return sum(len(node.names) for node in self._nodes.values()) // HASH_BYTES

    def __repr__(self) -> str:
        return f"ChainMultiset({len(self._nodes)} nodes, {len(self)} blocks)"

    def store(self, key: Key, chain: bytes) -> int:
        """Count `chain` once more for `key`. Returns how many leading blocks of it `key` held before."""
        nodes, position, held, end = self._nodes, 0, 0, len(chain)
        while position < end:
            first = chain[position : position + HASH_BYTES]
            node = nodes.get(first)
            if node is None:
                nodes[first] = _Node(chain[position:], {key: 1})
                break
            names = node.names
            if chain.startswith(names, position):
                position += len(names)
            else:
                shared = _shared_bytes(names, chain, position)
                self._split(node, shared)
                position += shared
            counts = node.counts
            if key in counts:
                counts[key] += 1
                held = position
            else:
                counts[key] = 1
        return held // HASH_BYTES

    def extend(self, key: Key, earlier: bytes, chain: bytes) -> None:
        """As `store` of `chain` and `remove` of `earlier`, which it begins with. Where nobody else goes that way the
        last node grows: conversations would leave a node for each turn."""
        path = self._path(key, earlier)
        if path and path[-1].counts == {key: 1}:
            path[-1].names += chain[len(earlier) :]
        else:
            self.store(key, chain)
            self.remove(key, earlier)

    def remove(self, key: Key, chain: bytes) -> None:
        """Take back one `store` of this very chain. What was never stored, or was forgotten, changes nothing."""
        path = self._path(key, chain)
        for node in path or ():
            remaining = node.counts[key] - 1
            if remaining:
                node.counts[key] = remaining
            else:
                self._drop(node, key)

    def depths(self, chain: bytes) -> Mapping[Key, int]:
        """Leading blocks of `chain` that each key holds."""
        depths: dict[Key, int] = {}
        nodes, position, end = self._nodes, 0, len(chain)
        while position < end:
            node = nodes.get(chain[position : position + HASH_BYTES])
            if node is None:
                break
            names = node.names
            whole = chain.startswith(names, position)
            position += len(names) if whole else _shared_bytes(names, chain, position)
            blocks = position // HASH_BYTES
            for key in node.counts:
                depths[key] = blocks
            if not whole:
                break
        return depths

    def forget(self, key: Key) -> None:
        """Drop every chain of `key`."""
        for node in [node for node in self._nodes.values() if key in node.counts]:
            self._drop(node, key)

    def _path(self, key: Key, chain: bytes) -> list[_Node] | None:
        """The nodes of a chain that `key` has stored; None where it has not."""
        path: list[_Node] = []
        position = 0
        while position < len(chain):
            node = self._nodes.get(chain[position : position + HASH_BYTES])
            if node is None or key not in node.counts or not chain.startswith(node.names, position):
                return None
            path.append(node)
            position += len(node.names)
        return path

    def _add(self, names: bytes, counts: dict[Key, int]) -> None:
        self._nodes[names[:HASH_BYTES]] = _Node(names, counts)

    def _split(self, node: _Node, at: int) -> None:
        """Cut a node in two. Every chain so far went through both."""
        self._add(node.names[at:], dict(node.counts))
        node.names = node.names[:at]

    def _drop(self, node: _Node, key: Key) -> None:
        del node.counts[key]
        if not node.counts:
            del self._nodes[node.names[:HASH_BYTES]]


def _shared_bytes(names: bytes, chain: bytes, position: int) -> int:
    """How much of a node's names `chain` has from `position` on; the first name is known to agree."""
    limit = min(len(names), len(chain) - position)
    if names[limit - HASH_BYTES : limit] == chain[position + limit - HASH_BYTES : position + limit]:
        return limit
    low, high = 1, limit // HASH_BYTES - 1
    while low < high:
        middle = (low + high + 1) // 2
        start = (middle - 1) * HASH_BYTES
        if names[start : start + HASH_BYTES] == chain[position + start : position + start + HASH_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low * HASH_BYTES
