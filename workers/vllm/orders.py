"""What the scheduler's side tells the worker's with every step, and what comes back. Values only; vLLM carries them
between its own processes.

They are carried out in this order, before anything is computed: `cleared`, `exported`, `dropped`, `cancelled`, `loads`,
`unmoved`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cachecore.blocks import PrefixHash
from cachecore.scope import Fidelity
from cachecore.transfer.errors import Reason
from cachecore.transfer.plan import Pull
from workers.vllm.reports import ReportKey


class Export(NamedTuple):
    """Consecutive blocks of one request that hold valid KV."""

    cache_salt: str | None
    fidelity: Fidelity
    parent: PrefixHash | None
    """The name before the first; None at the beginning of a prompt."""
    first_block: int
    """In the prompt."""
    names: bytes
    """Packed."""
    tokens: bytes
    """Packed."""
    blocks: Sequence[int]
    """Of the engine's pool."""


class RunOrder(NamedTuple):
    """Blocks `first_block` to `first_block + len(blocks)` of a prompt, out of the run of a plan."""

    pull: Pull
    first_block: int
    blocks: Sequence[int]


class Fusing(NamedTuple):
    """Passages of a prompt, by where they will stand, and what they become a part of."""

    passages: Sequence[Pull]
    token_ids: bytes
    """Of the whole prompt, packed."""
    blocks: Sequence[int]
    """Of the engine's pool: all from the prompt's first to the last that is filled."""
    first_block: int
    """What is before it is there, or comes as a run."""
    fraction: float | None
    """Of passages' tokens, what is recomputed; None leaves it to the fuser."""


class LoadOrder(NamedTuple):
    """What one request waits for. Answered once, well or not."""

    request_id: str
    cache_salt: str | None
    fidelity: Fidelity
    """The worst that may come."""
    runs: Sequence[RunOrder]
    """None where nothing will come: it has failed from the start."""
    fusing: Fusing | None = None
    key: ReportKey | None = None
    """As what its answer asks what became of it."""
    refused: Sequence[Reason] = ()
    """Why others of its plans are not carried out."""


class Unmoved(NamedTuple):
    """A request that came with plans and begins without a load of its own."""

    key: ReportKey | None
    fidelity: Fidelity
    refused: Sequence[Reason]
    """Why plans are not carried out. Of the others nothing was missing."""
    failed: bool
    """It waited for somebody else's load, which failed."""


@dataclass(slots=True)
class Orders:
    """Of one step."""

    cleared: bool = False
    """The engine has forgotten all its prefixes: nothing is served that was known before."""
    exported: list[Export] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    """Blocks that were given to somebody and will be written to."""
    cancelled: list[str] = field(default_factory=list)
    """Requests that nobody waits for any more; their loads are answered as well."""
    loads: list[LoadOrder] = field(default_factory=list)
    unmoved: list[Unmoved] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.cleared or self.exported or self.dropped or self.cancelled or self.loads or self.unmoved)


class Settled(NamedTuple):
    """What has become of loads since this was asked last."""

    request_ids: set[str]
    failed_ids: set[str]
    """Of those, who has to compute it all. A part that did come goes with the rest: vLLM would report all of the claim
    as cached if it kept that part."""
