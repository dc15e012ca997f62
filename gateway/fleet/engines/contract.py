"""What differs between engines, and what each says of itself.

Engines agree on OpenAI's routes and on little else. An `EngineAdapter` is the questions to one kind of engine: where it
says which models, block size, ranks and event sockets it has, how its queue, its token ids and its sleep are asked for.
`EngineTraits` is what is known of the kind without asking. (That a request ends where its connection closes is known of
all.) Adapters keep no state; what they found out is a `Discovery`, taken anew with each probe.

Every question may go unanswered, and then says nothing. Only a worker that lists no models is no worker (ProbeError).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from cachecore.holders import Worker
from gateway.fleet.engines.questions import Questions


class ModelEntry(dict[str, Any]):
    """An entry of a worker's `/v1/models`, kept with every field it came with."""

    @property
    def parent(self) -> str:
        """The base model of an adapter; empty for a base model."""
        return self.get("parent") or ""


class EventEndpoint(NamedTuple):
    """Where one rank publishes its KV events."""

    endpoint: str
    """A ZeroMQ address; or the URL of a route that is asked for them, again and again, and gives each once."""
    replay_endpoint: str | None = None
    topic: str = ""
    bind: bool = False
    """The publisher connects, so whoever wants to hear it has to bind."""


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """Where a worker publishes its KV events: one socket a rank, by rank."""

    sockets: tuple[EventEndpoint, ...]
    not_before: float = 0.0
    """Wall-clock seconds. What was said earlier holds no longer: the cache was emptied without a word for it."""
    block_size_tokens: int = 0
    """Of the engine, where its events do not say it."""

    @classmethod
    def at(
        cls, endpoint: str, replay_endpoint: str | None = None, topic: str = "", ranks: int = 1, bind: bool = False
    ) -> "EventEndpoints":
        """Rank r publishes on the port r above the first one's, as vLLM and SGLang do."""
        return cls(
            tuple(
                EventEndpoint(
                    _at_rank(endpoint, rank), _at_rank(replay_endpoint, rank) if replay_endpoint else None, topic, bind
                )
                for rank in range(ranks)
            )
        )

    @property
    def ranks(self) -> int:
        return len(self.sockets)

    @property
    def told_once(self) -> bool:
        """One reader at most: what it has heard, nobody else will."""
        return any(socket.endpoint.startswith(("http://", "https://")) for socket in self.sockets)

    def since(self, wall_seconds: float) -> "EventEndpoints":
        return replace(self, not_before=wall_seconds)


def _at_rank(endpoint: str, rank: int) -> str:
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}" if port.isdigit() else endpoint


class EngineLoad(NamedTuple):
    """What an engine said of its queue, and of its prefix cache since it started; all ranks together."""

    running: int
    waiting: int
    at: float
    """Wall-clock seconds."""
    queried_tokens: int | None = None
    """Prompt tokens that were looked up in the prefix cache; None when it does not say."""
    hit_tokens: int | None = None


class OpenPool(NamedTuple):
    """An L2 pool that a worker has open, as it said."""

    name: str
    generation: int
    run_blocks: int
    """Runs are cut at multiples of it."""
    codec: str


@dataclass(frozen=True, slots=True)
class TransferAbility:
    """What a worker says that it can do with KV of others (`/server_info`, "transfer")."""

    holder: Worker
    """How it calls itself in plans; not this gateway's name for it."""
    addresses: tuple[str, ...]
    """Where it serves; empty when it only pulls."""
    compatibility: str
    """Digest of its class: KV is exchanged within one."""
    codecs: frozenset[str]
    """That it serves and takes."""
    bytes_per_token: int
    """Of raw KV, all layers."""
    shifted: bool = False
    """Whether it takes runs that stood at other positions."""
    pools: tuple[OpenPool, ...] = ()

    def reaches(self, addresses: tuple[str, ...]) -> bool:
        """Whether it can pull from a source at these: over what it serves over itself, with TLS or without."""
        return not self.addresses or not _schemes(self.addresses).isdisjoint(_schemes(addresses))


def _schemes(addresses: tuple[str, ...]) -> set[str]:
    return {address.partition("://")[0] for address in addresses}


class Lack(NamedTuple):
    """Something that an engine was started without, and that costs."""

    name: str
    """The flag, or what stands for one."""
    cost: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}: {self.cost}; {self.remedy}"


@dataclass(slots=True)
class Discovery:
    """What a probe learned of a worker."""

    models: dict[str, ModelEntry]
    epoch: int | None = None
    """The process's own word for its life; None when it has none."""
    block_size_tokens: int = 0
    max_model_len: int = 0
    capacity_requests: int = 0
    """Requests that one rank runs at once; 0 when it does not say."""
    kv_tokens: int = 0
    """Tokens that the KV memory of one rank has room for; 0 when it does not say."""
    tokenizer_fingerprint: str = ""
    events: EventEndpoints | None = None
    transfer: TransferAbility | None = None
    """None when it moves nothing."""
    transfer_problem: str = ""
    """Why what it says of that is not believed."""
    version: str = ""
    revisions: dict[str, str] = field(default_factory=dict)
    """Model and adapter names to what is loaded under them, as far as the engine says: another one is other KV."""
    asleep: bool = False
    """It gave up its cache, and answers nothing until it is woken or something comes."""
    caches_prefixes: bool = True
    routes: frozenset[str] | None = None
    """Of those that the gateway could translate, the ones that it serves itself; None while that is not known."""

    def completed(self, earlier: "Discovery") -> "Discovery":
        """With what only an earlier probe of the same life could find out: a busy engine leaves questions open."""
        return replace(
            self,
            epoch=self.epoch if self.epoch is not None else earlier.epoch,
            block_size_tokens=self.block_size_tokens or earlier.block_size_tokens,
            max_model_len=self.max_model_len or earlier.max_model_len,
            capacity_requests=self.capacity_requests or earlier.capacity_requests,
            kv_tokens=self.kv_tokens or earlier.kv_tokens,
            events=_heard(self.events, earlier.events),
            version=self.version or earlier.version,
            routes=self.routes if self.routes is not None else earlier.routes,
            revisions={**earlier.revisions, **self.revisions},
        )

    def reloaded(self, earlier: "Discovery") -> str:
        """The name under which something else is loaded than before; empty when nothing is."""
        for name, revision in self.revisions.items():
            if earlier.revisions.get(name, revision) != revision:
                return name
        return ""


def _heard(now: EventEndpoints | None, earlier: EventEndpoints | None) -> EventEndpoints | None:
    return now.since(earlier.not_before) if now is not None and earlier is not None else now or earlier


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What is known of a kind of engine without asking."""

    salts: bool = False
    """It keeps prompts of different `cache_salt` apart."""
    salted_paths: frozenset[str] = frozenset()
    """Routes besides OpenAI's two that take one, too."""
    translated: bool = False
    """It is known to serve none of the routes that the gateway can translate, so it is not asked."""
    priorities: bool = False
    """It orders requests by `priority`, lower first."""
    token_ids: bool = False
    """`/v1/completions` takes token ids as `prompt`."""
    chat_token_ids: bool = False
    """A chat takes `kv_transfer_params.prompt_token_ids` in place of its messages."""
    hits_whole_blocks: bool = True
    """Of a prompt that it holds whole it computes the last token's block again; others that token alone."""
    rank_header: bytes = b""
    """Header that chooses the data-parallel rank; empty where it chooses by itself."""
    wakes_itself: bool = False
    """A sleeping one is woken by the next request."""


class EngineAdapter(Protocol):
    """The questions to one kind of engine."""

    @property
    def name(self) -> str: ...

    @property
    def traits(self) -> EngineTraits: ...

    async def health(self, ask: Questions) -> None:
        """Raises ProbeError unless the worker says it is well."""
        ...

    async def discover(
        self, ask: Questions, models: Sequence[ModelEntry], earlier: Discovery | None = None
    ) -> Discovery:
        """What it is, besides its models. What cannot change in a life need not be asked again of one whose `earlier`
        probe has said it."""
        ...

    async def lacks(self, ask: Questions, discovery: Discovery) -> Sequence[Lack]:
        """What it was started without. Asked once in a life: it may take a request or two more."""
        ...

    async def load(self, ask: Questions) -> EngineLoad | None:
        """Its queue; None when it does not say. Raises ProbeError."""
        ...

    async def tokenize(self, ask: Questions, request: Mapping[str, Any]) -> Sequence[int] | None:
        """Token ids of a prompt (`{"model", "prompt"}`) or of a chat's body, as it would compute them; None when it
        cannot tell. Raises ProbeError when it fails to."""
        ...
