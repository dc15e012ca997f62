"""The prefixes that prompts have shared lately and who holds them, as a radix tree of bounded size.

Made from the last receipts alone when somebody looks: names are chained, so equal names at one depth mean equal prompts
up to there, and chains in byte order stand beside those that they share most with.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from cachecore.blocks import HASH_BYTES, Chain
from cachecore.holders import Place
from cachecore.index.contract import Match, PrefixIndex
from policies.contract import Receipt

NODES_MAX = 32
HOLDERS_SHOWN = 6


@dataclass(slots=True, eq=False)
class Node:
    """A run of blocks that several of the receipts share, which stand side by side."""

    stop: int
    """Blocks up to its end, those before it counted in."""
    first: int
    """Place of the first of its receipts, in the order of their chains."""
    children: list["Node"] = field(default_factory=list)
    start: int = 0
    """Blocks before it."""
    count: int = 0
    """Of its receipts."""
    weight: int = 0
    """Blocks of it and of all below that need not be computed again for another of its receipts."""

    def close(self, start: int, last: int) -> None:
        """All of its receipts have been seen."""
        self.start, self.count = start, last - self.first + 1
        own = (self.stop - start) * (self.count - 1)
        self.weight = own + sum(child.weight for child in self.children)


class Tree(NamedTuple):
    roots: list[Node]
    ordered: list[Receipt]

    def newest(self, node: Node) -> Receipt:
        """Of the receipts that share a node."""
        return max(self.ordered[node.first : node.first + node.count], key=_decided_at)

    def chain(self, node: Node) -> Chain:
        return Chain(self.ordered[node.first].chain[: node.stop * HASH_BYTES])


def tree(receipts: Iterable[Receipt], nodes_max: int = NODES_MAX) -> Tree:
    """What at least two receipts share, heaviest first; of all nodes, the heaviest."""
    ordered = sorted((receipt for receipt in receipts if receipt.chain), key=_chain_of)
    roots = _nodes(ordered)
    waiting, kept = [*roots], set[Node]()
    while waiting and len(kept) < nodes_max:
        heaviest = max(waiting, key=_weight_of)
        waiting.remove(heaviest)
        waiting += heaviest.children
        kept.add(heaviest)
    return Tree(_pruned(roots, kept), ordered)


def document(receipts: Iterable[Receipt], index: PrefixIndex) -> list[dict[str, Any]]:
    """For `/status`. Who holds a prefix is null where only a remote index could tell."""
    shared = tree(receipts)
    return [_document(shared, node, index) for node in shared.roots]


def _document(shared: Tree, node: Node, index: PrefixIndex) -> dict[str, Any]:
    latest, chain = shared.newest(node), shared.chain(node)
    block = latest.block_size_tokens
    return {
        "name": chain[-HASH_BYTES:].hex(),
        "model": latest.model,
        "tenant": latest.tenant,
        "tokens": node.stop * block,
        "own_tokens": (node.stop - node.start) * block,
        "requests": node.count,
        "holders": _holders(chain, block, index),
        "children": [_document(shared, child, index) for child in node.children],
    }


def _holders(chain: Chain, block: int, index: PrefixIndex) -> dict[str, Any] | None:
    found = index.match(chain)
    if not isinstance(found, Match):
        found.close()  # type: ignore[attr-defined]  # a question to a server, which is not asked for a picture
        return None
    deepest: dict[str, tuple[int, Place]] = {}
    for place, depth in found.depths.items():
        name = place.holder.name
        if depth > deepest.get(name, (0, place))[0]:
            deepest[name] = (depth, place)
    best = sorted(deepest.items(), key=lambda entry: -entry[1][0])
    shown = [
        {"holder": name, "tier": place.tier.name.lower(), "tokens": depth * block}
        for name, (depth, place) in best[:HOLDERS_SHOWN]
    ]
    whole = sum(depth * HASH_BYTES == len(chain) for depth, _ in deepest.values())
    return {"count": len(best), "whole": whole, "shown": shown}


def _nodes(ordered: Sequence[Receipt]) -> list[Node]:
    """From what each receipt shares with the next one, in the order of their chains: a node is open as long as they
    share all of it, and those upon the stack contain each other."""
    root = Node(0, 0)
    stack = [root]
    for place, (one, other) in enumerate(pairwise(ordered)):
        depth = _shared(one.chain, other.chain)
        first, closed = place, None
        while depth < stack[-1].stop:
            closed = stack.pop()
            first = closed.first
            closed.close(max(depth, stack[-1].stop), place)
            if depth <= stack[-1].stop:
                stack[-1].children.append(closed)
                closed = None
        if depth > stack[-1].stop:
            stack.append(Node(depth, first, [] if closed is None else [closed]))
    while len(stack) > 1:
        closed = stack.pop()
        closed.close(stack[-1].stop, len(ordered) - 1)
        stack[-1].children.append(closed)
    return root.children


def _shared(one: bytes, other: bytes) -> int:
    """How many leading blocks two chains share."""
    low, high = 0, min(len(one), len(other)) // HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if _name(one, middle - 1) == _name(other, middle - 1):
            low = middle
        else:
            high = middle - 1
    return low


def _name(chain: bytes, block: int) -> bytes:
    return chain[block * HASH_BYTES : (block + 1) * HASH_BYTES]


def _pruned(nodes: Iterable[Node], kept: set[Node]) -> list[Node]:
    """Those kept, heaviest first. Above each of them all are."""
    result = sorted((node for node in nodes if node in kept), key=_weight_of, reverse=True)
    for node in result:
        node.children = _pruned(node.children, kept)
    return result


def _chain_of(receipt: Receipt) -> bytes:
    return receipt.chain


def _decided_at(receipt: Receipt) -> float:
    return receipt.decided_at


def _weight_of(node: Node) -> int:
    return node.weight
