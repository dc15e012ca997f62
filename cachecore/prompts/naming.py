"""Names prompts, and pays for what is new in them only.

What is known of prompts is a tree. A path from a root is a beginning of prompts, segment by segment; its node keeps how
many tokens that beginning has, the PrefixHashes of the blocks that its last segment completed, and the tokens left over
after the last full block. A prompt is named by walking down as far as it is known, then encoding and hashing the rest.
A root is a naming (its root hash covers model, tenant, salt and block size) and a renderer, so nothing is shared where
nothing may be.

Children are found by their segment's full text, never by a hash of it alone.

The last segment of a prompt is, in chats, the prompt for an answer that the next turn replaces, and the one before it
the question. As long as they are short they get no nodes: to encode a question once more, in the next turn, costs less
than to remember each one, and most prompts have no next turn. The tokens of the last come from the cache of segments.
A prompt that is known but for such an end is named at once (`begin`).

Memory is bounded in bytes. Leaves go first, those that were never met again before those that were, so that one-off
tails do not drive out what conversations share. What was met again may fill four fifths; the rest is room for the new.

Naming splits into `look_up` (touches the tree), `Work.compute` (pure: it may run in a thread) and `insert` (touches the
tree). Several works may be under way at once; inserting what another work has inserted meanwhile changes nothing.
"""

import sys
import time
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cachecore.blocks import EMPTY_CHAIN, HASH_BYTES, TOKEN_BYTES, BlockHasher, Chain, PrefixHash, pack_tokens
from cachecore.prompts.contract import NamedPrompt, Rendered
from cachecore.prompts.native import chats as native
from cachecore.scope import Naming

END_CHARACTERS_MIN = 256
"""A shorter last segment gets no node, nor does the one before it if both together are shorter."""
TOKENS_PER_CHUNK = 2048
"""Prompts of token ids are cut into chunks of this size."""

_NODE_BYTES = 600
"""What a node or cached segment costs besides its text and bytes: objects and dictionary slots, by tracemalloc."""
_TREE_SHARE = 0.75
_KEPT_SHARE = 0.8
_BYTES_PER_YIELD = 2**14
# A named tuple's own constructor is a function in Python.
_new = tuple.__new__
_LITTLE_ENDIAN = sys.byteorder == "little"
_YIELD_SECONDS = 50e-6
"""Long enough for the event loop's thread to take the GIL."""


class SegmentEncoder(Protocol):
    """What naming needs of a renderer."""

    fingerprint: str

    def encode(self, segment: str) -> "array[int]": ...


class _Node:
    """A beginning of prompts, as its last segment left it."""

    __slots__ = ("chain", "children", "key", "met_again", "name", "parent", "size_bytes", "tail", "token_count")

    def __init__(self, key: Hashable, token_count: int, chain: bytes, tail: bytes, name: PrefixHash) -> None:
        self.key = key
        """The segment's text; for the beginning that has no segment yet, what tells its root from others."""
        self.token_count = token_count
        """Of the whole beginning."""
        self.chain = chain
        """Names of the blocks that the last segment completed."""
        self.tail = tail
        """Packed tokens after the last full block."""
        self.name = name
        """Of the last full block, or the root's."""
        self.parent: _Node | None = None
        """None for the top, before it is inserted, and once evicted."""
        self.children: dict[Hashable, _Node] = {}
        self.met_again = False
        self.size_bytes = _NODE_BYTES + sys.getsizeof(key) + len(chain) + len(tail)


@dataclass(slots=True)
class NamerCounters:
    """For metrics. All but the last two only grow."""

    hits: int = 0
    """Segments whose names were known."""
    misses: int = 0
    encoded_characters: int = 0
    evicted: int = 0
    """Beginnings and cached segments."""
    nodes: int = 0
    bytes: int = 0


@dataclass(slots=True, eq=False)
class Work:
    """What is left to do for a prompt after looking it up."""

    encoder: SegmentEncoder
    naming: Naming
    complete: bool
    node: _Node
    """The deepest known beginning."""
    start: _Node
    """Where to go on from: `node`, or an unknown root."""
    chains: list[bytes]
    missing: Sequence[str]
    ending: int
    """How many of the missing segments are a short end: they get no nodes."""
    last_tokens: "array[int] | None"
    """Those of the last segment of a short end, where they are cached."""
    missing_characters: int
    """How much text `compute` will encode: what it costs, ahead of time."""
    nodes: list[_Node]
    """What `compute` found."""
    new_last_tokens: "array[int] | None" = None

    def compute(self) -> NamedPrompt:
        """Encode and hash what is missing. Touches nothing shared, so it may run in a thread. Raises PromptError."""
        start, missing, hasher = self.start, self.missing, self.naming.hasher
        if not missing:
            return NamedPrompt(start.token_count, Chain(b"".join(self.chains)), self.complete)
        if self.last_tokens is not None:
            tokens = [*map(self.encoder.encode, missing[:-1]), self.last_tokens]
        else:
            tokens = [*map(self.encoder.encode, missing)]
            if self.ending:
                self.new_last_tokens = tokens[-1]
        data = b"".join((start.tail, *(tokens if _LITTLE_ENDIAN else map(pack_tokens, tokens))))
        if len(data) <= _BYTES_PER_YIELD or max(map(len, tokens)) * TOKEN_BYTES <= _BYTES_PER_YIELD:
            chain = hasher.chain(start.name, data)
        else:
            chain = _chain_yielding(hasher, start.name, data)
        self._add_nodes(tokens, data, chain)
        count = start.token_count + (len(data) - len(start.tail)) // TOKEN_BYTES
        return NamedPrompt(count, Chain(b"".join((*self.chains, chain))), self.complete)

    def _add_nodes(self, tokens: "list[array[int]]", data: bytes, chain: bytes) -> None:
        """Cut what was computed for all segments at their ends."""
        block_bytes = self.naming.hasher.block_bytes
        token_count, name, end = self.start.token_count, self.start.name, len(self.start.tail)
        names_end = 0
        for segment, segment_tokens in zip(self.missing[: len(self.missing) - self.ending], tokens, strict=False):
            count = len(segment_tokens)
            token_count += count
            end += count * TOKEN_BYTES
            blocks = end // block_bytes
            names_start, names_end = names_end, blocks * HASH_BYTES
            if names_end > names_start:
                name = PrefixHash(chain[names_end - HASH_BYTES : names_end])
            self.nodes.append(
                _Node(segment, token_count, chain[names_start:names_end], data[blocks * block_bytes : end], name)
            )


class PromptNamer:
    """Names prompts, remembering names and tokens within `bytes_max`. Its methods belong to one thread."""

    def __init__(self, bytes_max: int) -> None:
        self.counters = NamerCounters()
        self._tree_bytes_max = int(bytes_max * _TREE_SHARE)
        self._kept_bytes_max = int(self._tree_bytes_max * _KEPT_SHARE)
        self._tree_bytes = self._kept_bytes = 0
        self._top = _Node("", 0, EMPTY_CHAIN, b"", PrefixHash(b""))
        self._new_leaves: OrderedDict[_Node, None] = OrderedDict()
        self._kept_leaves: OrderedDict[_Node, None] = OrderedDict()
        self._tokens = _TokenCache(bytes_max - self._tree_bytes_max, self.counters)

    def name(self, encoder: SegmentEncoder, naming: Naming, rendered: Rendered) -> NamedPrompt:
        """Token count and PrefixHashes of a prompt. Raises PromptError when it cannot be encoded."""
        work = self.look_up(encoder, naming, rendered)
        named = work.compute()
        self.insert(work)
        return named

    def name_tokens(self, naming: Naming, token_ids: Sequence[int]) -> NamedPrompt:
        """Name a prompt given as token ids. Raises OverflowError for an id outside [0, 2**32)."""
        work = self.look_up_tokens(naming, token_ids)
        named = work.compute()
        self.insert(work)
        return named

    def look_up_tokens(self, naming: Naming, token_ids: Sequence[int]) -> "Work":
        """As `look_up`, of a prompt given as token ids. Raises OverflowError for an id outside [0, 2**32)."""
        return self.look_up(_TOKEN_IDS, naming, _TOKEN_IDS.render(token_ids))

    def tokens(self, encoder: SegmentEncoder, naming: Naming, rendered: Rendered) -> "array[int]":
        """Token ids (typecode 'I') of a rendered prompt. Raises PromptError when it cannot be encoded."""
        joined = array("I")
        for segment in rendered.segments:
            key = (naming.root, encoder.fingerprint, segment)
            tokens = self._tokens.get(key)
            if tokens is None:
                tokens = encoder.encode(segment)
                self._tokens.put(key, tokens)
            joined.extend(tokens)
        return joined

    def begin(self, encoder: SegmentEncoder, naming: Naming, rendered: Rendered) -> "NamedPrompt | Work":
        """A prompt's names, where all but a short end of it is known; else what is left to do. Raises PromptError."""
        root = self._top.children.get((naming.root, encoder.fingerprint))
        if root is None or not _LITTLE_ENDIAN:
            return self.look_up(encoder, naming, rendered)
        segments = rendered.segments
        chains: list[bytes] = []
        node = self._descend(root, segments, chains)
        missing = len(segments) - len(chains)
        if 0 < missing <= 2:
            tokens = self._tokens.get((naming.root, encoder.fingerprint, segments[-1]))
            before = segments[-2] if missing == 2 else ""
            if tokens is not None and len(before) + len(segments[-1]) < END_CHARACTERS_MIN:
                data = b"".join((node.tail, encoder.encode(before) if before else b"", tokens))
                chains.append(naming.hasher.chain(node.name, data))
                counters, count = self.counters, node.token_count + (len(data) - len(node.tail)) // TOKEN_BYTES
                counters.misses += missing
                counters.encoded_characters += len(before)
                return _new(NamedPrompt, (count, Chain(b"".join(chains)), rendered.complete))
        return self._work(encoder, naming, rendered, node, node, chains)

    def look_up(self, encoder: SegmentEncoder, naming: Naming, rendered: Rendered) -> Work:
        """Walk down as far as the prompt is known."""
        root_key = (naming.root, encoder.fingerprint)
        root = self._top.children.get(root_key)
        chains: list[bytes] = []
        if root is None:
            start = _Node(root_key, 0, EMPTY_CHAIN, b"", naming.root)
            return self._work(encoder, naming, rendered, self._top, start, chains)
        node = self._descend(root, rendered.segments, chains)
        return self._work(encoder, naming, rendered, node, node, chains)

    def _work(
        self,
        encoder: SegmentEncoder,
        naming: Naming,
        rendered: Rendered,
        node: _Node,
        start: _Node,
        chains: list[bytes],
    ) -> Work:
        missing = rendered.segments[len(chains) :]
        ending, last_tokens, characters = 0, None, 0
        if missing:
            last = missing[-1]
            if len(last) < END_CHARACTERS_MIN:
                ending = 2 if len(missing) > 1 and len(missing[-2]) + len(last) < END_CHARACTERS_MIN else 1
                last_tokens = self._tokens.get((naming.root, encoder.fingerprint, last))
            characters = sum(map(len, missing)) - (0 if last_tokens is None else len(last))
            self.counters.misses += len(missing)
        return Work(
            encoder, naming, rendered.complete, node, start, chains, missing, ending, last_tokens, characters, []
        )

    def insert(self, work: Work) -> None:
        """Remember what a work computed."""
        self.counters.encoded_characters += work.missing_characters
        nodes, parent = work.nodes, work.node
        if work.new_last_tokens is not None:
            self._tokens.put((work.naming.root, work.encoder.fingerprint, work.missing[-1]), work.new_last_tokens)
        if parent is self._top:
            parent = self._child(parent, work.start)
        elif not nodes or parent.parent is None:
            return
        for node in nodes:
            parent = self._child(parent, node)
        if not parent.children and not parent.met_again:
            self._new_leaves[parent] = None
        if self._tree_bytes > self._tree_bytes_max:
            self._make_room()

    def _descend(self, node: _Node, segments: Sequence[str], chains: list[bytes]) -> _Node:
        """The deepest node on the path of `segments`; `chains` gains what the path's nodes hold."""
        beginning, node = node, walk(node, segments, chains)
        if node.met_again:
            if not node.children:
                self._kept_leaves.move_to_end(node)
        else:
            met: _Node | None = node
            # What was met again has been reached through nodes that were.
            while met is not None and met is not beginning and not met.met_again:
                self._keep(met)
                met = met.parent
        self.counters.hits += len(chains)
        return node

    def _keep(self, node: _Node) -> None:
        """A node was met again."""
        node.met_again = True
        self._kept_bytes += node.size_bytes
        if not node.children:
            del self._new_leaves[node]
            self._kept_leaves[node] = None

    def _child(self, parent: _Node, node: _Node) -> _Node:
        """`node` as a child of `parent`, or the equal one that is there."""
        children = parent.children
        known = children.get(node.key)
        if known is not None:
            return known
        if not children:
            (self._kept_leaves if parent.met_again else self._new_leaves).pop(parent, None)
        children[node.key] = node
        node.parent = parent
        self._tree_bytes += node.size_bytes
        counters = self.counters
        counters.bytes += node.size_bytes
        counters.nodes += 1
        return node

    def _make_room(self) -> None:
        while self._tree_bytes > self._tree_bytes_max:
            crowded = self._kept_bytes > self._kept_bytes_max or not self._new_leaves
            leaves = self._kept_leaves if crowded and self._kept_leaves else self._new_leaves
            self._evict(leaves.popitem(last=False)[0])

    def _evict(self, node: _Node) -> None:
        parent, node.parent = node.parent, None
        self._tree_bytes -= node.size_bytes
        self._kept_bytes -= node.size_bytes if node.met_again else 0
        self.counters.bytes -= node.size_bytes
        self.counters.nodes -= 1
        self.counters.evicted += 1
        if parent is None:
            return
        del parent.children[node.key]
        if parent.children or parent is self._top:
            return
        if parent.met_again:
            self._kept_leaves[parent] = None
        else:
            # The rest of a branch that nobody came back to goes before anything else.
            self._new_leaves[parent] = None
            self._new_leaves.move_to_end(parent, last=False)


def python_walk(node: _Node, segments: Sequence[str], chains: list[bytes]) -> _Node:
    """The deepest node on the path of `segments` from a node; `chains` gains what the path's nodes hold."""
    for segment in segments:
        child = node.children.get(segment)
        if child is None:
            break
        node = child
        chains.append(node.chain)
    return node


walk = python_walk if native is None else native.walk


class _TokenCache(dict[tuple[PrefixHash, str, str], "array[int]"]):
    """Tokens by root, fingerprint and segment, so that what one tenant sends is no faster for another; within
    `bytes_max`: the oldest goes first, and is soon back if it matters."""

    def __init__(self, bytes_max: int, counters: NamerCounters) -> None:
        super().__init__()
        self._bytes_max = bytes_max
        self._bytes = 0
        self._counters = counters

    def put(self, key: tuple[PrefixHash, str, str], tokens: "array[int]") -> None:
        if key in self:
            return
        self[key] = tokens
        self._account(_entry_bytes(key[-1], tokens))
        while self._bytes > self._bytes_max:
            oldest = next(iter(self))
            self._account(-_entry_bytes(oldest[-1], self.pop(oldest)))
            self._counters.evicted += 1

    def _account(self, change_bytes: int) -> None:
        self._bytes += change_bytes
        self._counters.bytes += change_bytes


class _TokenIds:
    """Prompts that come as token ids: a chunk's segment is its packed tokens, read as latin-1."""

    fingerprint = "token-ids"

    def render(self, token_ids: Sequence[int]) -> Rendered:
        text = pack_tokens(token_ids).decode("latin-1")
        size = TOKENS_PER_CHUNK * 4
        return Rendered([text[start : start + size] for start in range(0, len(text), size)])

    def encode(self, segment: str) -> "array[int]":
        token_ids = array("I", segment.encode("latin-1"))
        if sys.byteorder == "big":
            token_ids.byteswap()
        return token_ids


_TOKEN_IDS = _TokenIds()


def _entry_bytes(segment: str, tokens: "array[int]") -> int:
    return _NODE_BYTES + sys.getsizeof(segment) + sys.getsizeof(tokens)


def _chain_yielding(hasher: BlockHasher, name: PrefixHash, data: bytes) -> Chain:
    """As `BlockHasher.chain`, giving other threads the GIL now and then."""
    stride = max(_BYTES_PER_YIELD // hasher.block_bytes, 1) * hasher.block_bytes
    parts: list[Chain] = []
    for start in range(0, len(data) - hasher.block_bytes + 1, stride):
        part = hasher.chain(name, data[start : start + stride])
        name = PrefixHash(part[-HASH_BYTES:])
        parts.append(part)
        time.sleep(_YIELD_SECONDS)
    return Chain(b"".join(parts))
