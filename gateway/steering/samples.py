"""What is kept of requests for operators' questions: decisions that can be taken again, and prompts that are hot.

At most so many a second are looked at (`samples.per_second_max`): all of a quiet gateway's requests, of a busy one's an
even part. A prompt is kept as its client sent it, in this process's memory alone, within `samples.bodies_bytes_max`.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from cachecore.blocks import HASH_BYTES, Chain
from gateway.config import SamplesConfig
from gateway.edge.server import Inbound
from gateway.fleet.worker import ModelPool
from gateway.requests import Request
from gateway.tenants import Tenant
from policies.contract import Query, Snapshot
from policies.replay import Moment, freeze

PROMPTS_MAX = 1000
BLOCKS_SEARCHED_MAX = 2048
"""Of each prompt, for what it has in common with others."""
_BODY_SHARE_MAX = 8
"""No body takes more than this part of the bytes."""


class Prompt(NamedTuple):
    """A request that was sampled."""

    inbound: Inbound
    tenant: Tenant
    model: str
    """The pool's."""
    generation: int
    """Of the pool, when it was named."""
    chain: Chain
    block_size_tokens: int


class HotPrefix(NamedTuple):
    """What several of the sampled prompts begin with."""

    example: Prompt
    """The shortest of them."""
    blocks: int
    prompts: int
    """How many begin so."""

    @property
    def chain(self) -> Chain:
        return Chain(self.example.chain[: self.blocks * HASH_BYTES])

    @property
    def name(self) -> str:
        """Of its last block, in hexadecimal: it stands for all before it."""
        return self.example.chain[(self.blocks - 1) * HASH_BYTES : self.blocks * HASH_BYTES].hex()

    @property
    def tokens(self) -> int:
        return self.blocks * self.example.block_size_tokens


class Samples:
    """The newest of them; the oldest make room."""

    def __init__(self, config: SamplesConfig) -> None:
        self.due = 0.0
        """When, by the clock of decisions, the next one is taken."""
        self.moments: deque[Moment] = deque(maxlen=config.decisions_max)
        self._interval_seconds = 1.0 / config.per_second_max
        self._prompts: deque[Prompt] = deque()
        self._bytes_max = config.bodies_bytes_max
        self._bytes = 0

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Newest last."""
        return tuple(self._prompts)

    def take(self, request: Request, pool: ModelPool, chain: Chain, query: Query, known: Snapshot) -> None:
        """Keep a request that has been decided and not been counted yet."""
        self.due = known.now + self._interval_seconds
        self.moments.append(freeze(query, known))
        size = len(request.data)
        if not chain or request.prompts_count != 1 or request.body is None or size > self._bytes_max // _BODY_SHARE_MAX:
            return
        inbound = Inbound(request.head, request.path, request.data, "")
        prompt = Prompt(inbound, request.tenant, pool.model, pool.generation, chain, pool.block_size_tokens)
        self._prompts.append(prompt)
        self._bytes += size
        while self._bytes > self._bytes_max or len(self._prompts) > PROMPTS_MAX:
            self._bytes -= len(self._prompts.popleft().inbound.body)


def hottest(prompts: Iterable[Prompt], count: int) -> list[HotPrefix]:
    """What is worth most to have: blocks times the prompts that begin so, two at least. What another one of the list
    begins with is not listed again."""
    examples: dict[bytes, Prompt] = {}
    counts: Counter[bytes] = Counter()
    for prompt in prompts:
        for name in _names(prompt.chain):
            counts[name] += 1
            known = examples.get(name)
            if known is None or len(prompt.chain) < len(known.chain):
                examples[name] = prompt
    found = [HotPrefix(examples[name], blocks, counts[name]) for name, blocks in _forks(examples, counts)]
    found.sort(key=lambda prefix: prefix.blocks * prefix.prompts, reverse=True)
    listed: list[HotPrefix] = []
    covered: set[bytes] = set()
    for prefix in found:
        if len(listed) == count:
            break
        if bytes.fromhex(prefix.name) not in covered:
            listed.append(prefix)
            covered.update(_names(prefix.chain))
    return listed


def _forks(examples: dict[bytes, Prompt], counts: Counter[bytes]) -> Iterator[tuple[bytes, int]]:
    """The last block of every stretch that the same prompts share, and its depth in blocks."""
    seen: set[bytes] = set()
    for prompt in {id(prompt): prompt for prompt in examples.values()}.values():
        names = list(_names(prompt.chain))
        for depth, name in enumerate(names, start=1):
            is_last = depth == len(names) or counts[names[depth]] < counts[name]
            if is_last and counts[name] > 1 and name not in seen:
                seen.add(name)
                yield name, depth


def _names(chain: Chain) -> Iterator[bytes]:
    for start in range(0, min(len(chain), BLOCKS_SEARCHED_MAX * HASH_BYTES), HASH_BYTES):
        yield chain[start : start + HASH_BYTES]
