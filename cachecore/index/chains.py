"""A multiset of chains per key: who is believed to hold which prefix, from whole chains that come and go.

The index proper counts blocks, because engines announce blocks. Beliefs (predicted insertions, routing history) are
whole chains from block 0, stored and taken back as they were, so a compressed trie that counts chains per node is
enough: each call costs the nodes on its path, however long they are.

A node is a run of blocks that every chain through it shares. Names are chained (see `cachecore.blocks`), so a node is
found by the name of its first block alone, and its last name confirms all of it.
"""

from typing import TYPE_CHECKING

from cachecore.blocks import HASH_BYTES
from cachecore.native import native

Key = tuple[str, int]
Node = tuple[bytes, dict[Key, int]]
"""(names, how many chains of each key go through them)."""
Nodes = dict[bytes, Node]
"""By the name of the first block."""


class ChainMultiset:
    """Implements `policies.state.chains.ChainStore`."""

    def __init__(self) -> None:
        self._nodes: Nodes = {}

    def __len__(self) -> int:
        """Distinct blocks held by anyone."""
        return sum(len(names) for names, _ in self._nodes.values()) // HASH_BYTES

    def __repr__(self) -> str:
        return f"ChainMultiset({len(self._nodes)} nodes, {len(self)} blocks)"

    def store(self, key: Key, chain: bytes) -> int:
        """Count `chain` once more for `key`. Returns how many leading blocks of it `key` held before."""
        return stored(self._nodes, key, chain)

    def extend(self, key: Key, earlier: bytes, chain: bytes) -> None:
        """As `store` of `chain` and `remove` of `earlier`, which it begins with. Where nobody else goes that way the
        last node grows: conversations would leave a node for each turn."""
        path = _path(self._nodes, key, earlier)
        if path and path[-1][1] == {key: 1}:
            names, counts = path[-1]
            self._nodes[names[:HASH_BYTES]] = names + chain[len(earlier) :], counts
        else:
            self.store(key, chain)
            self.remove(key, earlier)

    def remove(self, key: Key, chain: bytes) -> None:
        """Take back one `store` of this very chain. What was never stored, or was forgotten, changes nothing."""
        taken(self._nodes, key, chain)

    def depths(self, chain: bytes) -> dict[Key, int]:
        """Leading blocks of `chain` that each key holds."""
        return depths(self._nodes, chain)

    def forget(self, key: Key) -> None:
        """Drop every chain of `key`."""
        for node in [node for node in self._nodes.values() if key in node[1]]:
            _drop(self._nodes, node, key)


def python_stored(nodes: Nodes, key: Key, chain: bytes) -> int:
    """Count a chain once more for `key`. Returns how many leading blocks of it `key` held before."""
    position, held, end = 0, 0, len(chain)
    while position < end:
        first = chain[position : position + HASH_BYTES]
        node = nodes.get(first)
        if node is None:
            nodes[first] = chain[position:], {key: 1}
            break
        names, counts = node
        shared = _shared_bytes(names, chain, position)
        if shared < len(names):
            # Every chain so far went through both halves.
            nodes[names[shared : shared + HASH_BYTES]] = names[shared:], counts.copy()
            nodes[first] = names[:shared], counts
        position += shared
        if key in counts:
            counts[key] += 1
            held = position
        else:
            counts[key] = 1
    return held // HASH_BYTES


def python_taken(nodes: Nodes, key: Key, chain: bytes) -> bool:
    """Take back one count of a chain. False where `key` has not stored it: that changes nothing."""
    path = _path(nodes, key, chain)
    for node in path or ():
        counts = node[1]
        if counts[key] > 1:
            counts[key] -= 1
        else:
            _drop(nodes, node, key)
    return path is not None


def python_depths(nodes: Nodes, chain: bytes) -> dict[Key, int]:
    """Leading blocks of a chain that each key holds."""
    depths: dict[Key, int] = {}
    position, end = 0, len(chain)
    while position < end:
        node = nodes.get(chain[position : position + HASH_BYTES])
        if node is None:
            break
        names, counts = node
        shared = _shared_bytes(names, chain, position)
        position += shared
        depths.update(dict.fromkeys(counts, position // HASH_BYTES))
        if shared < len(names):
            break
    return depths


if TYPE_CHECKING or native is None:
    stored, taken, depths = python_stored, python_taken, python_depths
else:
    stored, taken, depths = native.stored, native.taken, native.depths


def _path(nodes: Nodes, key: Key, chain: bytes) -> list[Node] | None:
    """The nodes of a chain that `key` has stored; None where it has not."""
    path: list[Node] = []
    position = 0
    while position < len(chain):
        node = nodes.get(chain[position : position + HASH_BYTES])
        if node is None or key not in node[1] or not chain.startswith(node[0], position):
            return None
        path.append(node)
        position += len(node[0])
    return path


def _drop(nodes: Nodes, node: Node, key: Key) -> None:
    names, counts = node
    del counts[key]
    if not counts:
        del nodes[names[:HASH_BYTES]]


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
