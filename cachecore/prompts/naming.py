"""Names prompts, and pays for what is new in them only.

What is known of prompts is a tree. A path from a root is a beginning of prompts, segment by segment; its node keeps how
many tokens that beginning has, the PrefixHashes of the blocks that its last segment completed, and the tokens left over
after the last full block. A prompt is named by walking down as far as it is known, then encoding and hashing the rest.
A root is a naming (its root hash covers model, tenant, salt and block size) and a renderer, so nothing is shared where
nothing may be.

Children are found by their segment's full text, never by a hash of it alone.

The last segment of a prompt is, in chats, the prompt for an answer that the next turn replaces. It gets no node unless
it is long; its tokens come from the cache of segments.

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
from typing import NamedTuple, Protocol

from cachecore.blocks import EMPTY_CHAIN, HASH_BYTES, Chain, PrefixHash, pack_tokens
from cachecore.prompts.contract import NamedPrompt, Rendered
from cachecore.scope import Naming

LAST_SEGMENT_CHARACTERS_MIN = 256
"""A shorter last segment gets no node."""
TOKENS_PER_CHUNK = 2048
"""Prompts of token ids are cut into chunks of this size."""

_NODE_BYTES = 600
"""What a node or cached segment costs besides its text and bytes: objects and dictionary slots, by tracemalloc."""
_TREE_SHARE = 0.75
_KEPT_SHARE = 0.8
_BYTES_PER_YIELD = 2**14
_YIELD_SECONDS = 50e-6
"""Long enough for the event loop's thread to take the GIL."""


class SegmentEncoder(Protocol):
    """What naming needs of a renderer."""

    fingerprint: str

    def encode(self, segment: str) -> "array[int]": ...


class _Step(NamedTuple):
    """A beginning of prompts, as its last segment left it."""

    key: Hashable
    """The segment's text; for the beginning that has no segment yet, what tells its root from others."""
    token_count: int
    """Of the whole beginning."""
    chain: Chain
    """Names of the blocks that the last segment completed."""
    tail: bytes
    """Packed tokens after the last full block."""
    name: PrefixHash
    """Of the last full block, or the root's."""


class _Node:
    __slots__ = ("children", "met_again", "parent", "size_bytes", "step")

    def __init__(self, parent: "_Node | None", step: _Step) -> None:
        self.parent = parent
        """None for the top, and once evicted."""
        self.step = step
        self.children: dict[Hashable, _Node] = {}
        self.met_again = False
        self.size_bytes = _NODE_BYTES + sys.getsizeof(step.key) + len(step.chain) + len(step.tail)


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
    start: _Step
    """Where to go on from: that of `node`, or an unknown root's."""
    chains: list[Chain]
    missing: Sequence[str]
    known_tokens: "dict[str, array[int]]"
    """Tokens of missing segments, as far as they are cached; `compute` adds the others."""
    missing_characters: int
    """How much text `compute` will encode: what it costs, ahead of time."""
    steps: list[_Step]
    """What `compute` found."""

    def compute(self) -> NamedPrompt:
        """Encode and hash what is missing. Touches nothing shared, so it may run in a thread. Raises PromptError."""
        _, token_count, _, tail, name = self.start
        for segment in self.missing:
            tokens = self.known_tokens.get(segment)
            if tokens is None:
                tokens = self.known_tokens[segment] = self.encoder.encode(segment)
            token_count += len(tokens)
            chain, tail, name = _extend(self.naming, name, tail, tokens)
            self.chains.append(chain)
            self.steps.append(_Step(segment, token_count, chain, tail, name))
        return NamedPrompt(token_count, Chain(b"".join(self.chains)), self.complete)


class PromptNamer:
    """Names prompts, remembering names and tokens within `bytes_max`. Its methods belong to one thread."""

    def __init__(self, bytes_max: int) -> None:
        self.counters = NamerCounters()
        self._tree_bytes_max = int(bytes_max * _TREE_SHARE)
        self._kept_bytes_max = int(self._tree_bytes_max * _KEPT_SHARE)
        self._tree_bytes = self._kept_bytes = 0
        self._top = _Node(None, _Step("", 0, EMPTY_CHAIN, b"", PrefixHash(b"")))
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
        return self.name(_TOKEN_IDS, naming, _TOKEN_IDS.render(token_ids))

    def tokens(self, encoder: SegmentEncoder, rendered: Rendered) -> "array[int]":
        """Token ids (typecode 'I') of a rendered prompt. Raises PromptError when it cannot be encoded."""
        joined = array("I")
        for segment in rendered.segments:
            tokens = self._tokens.get(encoder.fingerprint, segment)
            if tokens is None:
                tokens = encoder.encode(segment)
                self._tokens.put(encoder.fingerprint, segment, tokens)
            joined.extend(tokens)
        return joined

    def look_up(self, encoder: SegmentEncoder, naming: Naming, rendered: Rendered) -> Work:
        """Walk down as far as the prompt is known."""
        root_key = (naming.root, encoder.fingerprint)
        node = self._top.children.get(root_key)
        chains: list[Chain] = []
        missing = rendered.segments
        if node is None:
            node, start = self._top, _Step(root_key, 0, EMPTY_CHAIN, b"", naming.root)
        else:
            node = self._descend(node, missing, chains)
            missing, start = missing[len(chains) :], node.step
        tokens: dict[str, array[int]] = {}
        characters = 0
        for segment in missing:
            cached = self._tokens.get(encoder.fingerprint, segment)
            if cached is None:
                characters += len(segment)
            else:
                tokens[segment] = cached
        self.counters.misses += len(missing)
        return Work(encoder, naming, rendered.complete, node, start, chains, missing, tokens, characters, [])

    def insert(self, work: Work) -> None:
        """Remember what a work computed."""
        self.counters.encoded_characters += work.missing_characters
        steps, node = work.steps, work.node
        if steps and len(work.missing[-1]) < LAST_SEGMENT_CHARACTERS_MIN:
            last = work.missing[-1]
            self._tokens.put(work.encoder.fingerprint, last, work.known_tokens[last])
            steps = steps[:-1]
        if not steps or (node.parent is None and node is not self._top):
            return
        if node is self._top:
            node = self._child(node, work.start)
        for step in steps:
            node = self._child(node, step)
        if not node.children and not node.met_again:
            self._new_leaves[node] = None
        self._make_room()

    def _descend(self, node: _Node, segments: Sequence[str], chains: list[Chain]) -> _Node:
        """The deepest node on the path of `segments`; `chains` gains what the path's nodes hold."""
        for segment in segments:
            child = node.children.get(segment)
            if child is None:
                break
            node = child
            chains.append(node.step.chain)
            if not node.met_again:
                self._keep(node)
        if not node.children and node.met_again:
            self._kept_leaves.move_to_end(node)
        self.counters.hits += len(chains)
        return node

    def _keep(self, node: _Node) -> None:
        """A node was met again."""
        node.met_again = True
        self._kept_bytes += node.size_bytes
        if not node.children:
            del self._new_leaves[node]
            self._kept_leaves[node] = None

    def _child(self, node: _Node, step: _Step) -> _Node:
        child = node.children.get(step.key)
        if child is not None:
            return child
        if not node.children:
            (self._kept_leaves if node.met_again else self._new_leaves).pop(node, None)
        child = node.children[step.key] = _Node(node, step)
        self._tree_bytes += child.size_bytes
        self.counters.bytes += child.size_bytes
        self.counters.nodes += 1
        return child

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
        del parent.children[node.step.key]
        if parent.children or parent is self._top:
            return
        if parent.met_again:
            self._kept_leaves[parent] = None
        else:
            # The rest of a branch that nobody came back to goes before anything else.
            self._new_leaves[parent] = None
            self._new_leaves.move_to_end(parent, last=False)


class _TokenCache:
    """Tokens by segment, within `bytes_max`; the least recently used goes first."""

    def __init__(self, bytes_max: int, counters: NamerCounters) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._counters = counters
        self._entries: OrderedDict[tuple[str, str], array[int]] = OrderedDict()

    def get(self, fingerprint: str, segment: str) -> "array[int] | None":
        key = (fingerprint, segment)
        tokens = self._entries.get(key)
        if tokens is not None:
            self._entries.move_to_end(key)
        return tokens

    def put(self, fingerprint: str, segment: str, tokens: "array[int]") -> None:
        key = (fingerprint, segment)
        if key in self._entries:
            return
        self._entries[key] = tokens
        self._account(_entry_bytes(segment, tokens))
        while self._bytes > self._bytes_max:
            (_, dropped), tokens = self._entries.popitem(last=False)
            self._account(-_entry_bytes(dropped, tokens))
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


def _extend(naming: Naming, name: PrefixHash, tail: bytes, token_ids: "array[int]") -> tuple[Chain, bytes, PrefixHash]:
    """Names of the blocks that `token_ids` complete, what is left after them, and the last name."""
    data = tail + pack_tokens(token_ids)
    step = naming.hasher.block_bytes
    end = len(data) - len(data) % step
    if not end:
        return EMPTY_CHAIN, data, name
    if end <= _BYTES_PER_YIELD:
        chain = naming.hasher.chain(name, data)
    else:
        chain = _chain_yielding(naming, name, memoryview(data)[:end])
    return chain, data[end:], PrefixHash(chain[-HASH_BYTES:])


def _chain_yielding(naming: Naming, name: PrefixHash, data: memoryview) -> Chain:
    """As `BlockHasher.chain`, for full blocks, giving other threads the GIL now and then."""
    hasher = naming.hasher
    stride = max(_BYTES_PER_YIELD // hasher.block_bytes, 1) * hasher.block_bytes
    parts: list[Chain] = []
    for start in range(0, len(data), stride):
        part = hasher.chain(name, data[start : start + stride])
        name = PrefixHash(part[-HASH_BYTES:])
        parts.append(part)
        time.sleep(_YIELD_SECONDS)
    return Chain(b"".join(parts))
