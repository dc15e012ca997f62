"""The scheduler's side: what becomes of each request's plans, and which blocks are announced to the worker's side.

    looked up ─► claimed ─► loading ─► done        what follows is computed, and exported as it is
                    └────────► done      └► failed   the engine computes it; plans are not tried twice

The engine asks about a request at every step until it has room for it (`match`), gives it blocks (`allocated`), and
hears of the load once (`received`). A request that loads has all tokens of its claim counted as computed although none
may be there: until `received` nothing of it is exported, and if it is aborted meanwhile the engine keeps its blocks
until then.

Who wants what is just being loaded for somebody else waits for that instead of loading it twice; if it fails, it has
failed for both.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple, Protocol

from cachecore.blocks import HASH_BYTES, PrefixHash, pack_tokens
from cachecore.scope import Fidelity
from cachecore.transfer.errors import Reason
from cachecore.transfer.plan import Pull
from workers.vllm.names import Lineage, RequestNames, Tokens
from workers.vllm.orders import Export, Fusing, LoadOrder, Orders, RunOrder, Unmoved
from workers.vllm.reports import ReportKey


class EngineRequest(Protocol):
    """As much of vLLM's request as is looked at."""

    @property
    def request_id(self) -> str: ...

    @property
    def cache_salt(self) -> str | None: ...

    @property
    def kv_transfer_params(self) -> Any: ...

    @property
    def all_token_ids(self) -> Tokens: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_computed_tokens(self) -> int: ...


class Scheduled(NamedTuple):
    """A request that is computed in the step that is being made."""

    request_id: str
    blocks: Sequence[int]
    """All of its blocks where it `begins`, else those that it got in this step."""
    begins: bool
    """For the first time, or again after it was preempted."""
    computed_tokens: int


class Phase(StrEnum):
    LOOKED_UP = "looked up"
    CLAIMED = "claimed"
    LOADING = "loading"
    DONE = "done"
    FAILED = "failed"


class Claim(NamedTuple):
    """What the engine was told that would come."""

    first_block: int
    runs: Sequence[tuple[Pull, int, int]]
    """The part of each, as first and end block of the prompt."""
    passages: Sequence[Pull]
    """What is repaired behind the runs, as far as that makes blocks."""
    end_block: int

    @property
    def runs_end_block(self) -> int:
        return self.runs[-1][2] if self.runs else self.first_block


class Planned(NamedTuple):
    """What there is to be made of a request's plans."""

    pulls: Sequence[Pull] = ()
    """Those of its own chain that are carried out, by position."""
    passages: Sequence[Pull] = ()
    """Those of others, by where they will stand."""
    fraction: float | None = None
    """Of passages' tokens, what is to be recomputed."""
    refused: Sequence[Reason] = ()
    """Why others are not."""
    key: ReportKey | None = None

    def __bool__(self) -> bool:
        return bool(self.pulls or self.passages or self.refused)


_NO_PLANS = Planned()


@dataclass(slots=True, eq=False)
class _Tracked:
    request: EngineRequest
    lineage: Lineage
    names: RequestNames
    planned: Planned
    phase: Phase = Phase.LOOKED_UP
    claim: Claim | None = None
    waits_for: str | None = None
    owes_report: bool = False
    computed_once: bool = False
    """A step that is past has computed some of it, so that all it counts as computed is there."""
    exported: int = 0
    """Leading blocks."""

    @property
    def key(self) -> str | None:
        """Within which the engine shares blocks."""
        return self.request.cache_salt


Reader = Callable[[EngineRequest, RequestNames, Fidelity], Planned]


class Requests:
    """See the module's opening. For one engine, on its scheduler's thread."""

    def __init__(
        self,
        lineage_of: Callable[[str | None], Lineage | None],
        read: Reader,
        block_size_tokens: int,
    ) -> None:
        """`read` finds the plans that a request may have carried out; it raises nothing."""
        self._lineage_of = lineage_of
        self._read = read
        self._size = block_size_tokens
        self._tracked: dict[str, _Tracked] = {}
        self._arriving: dict[tuple[str | None, PrefixHash], str] = {}
        """Blocks on their way, and for which request."""
        self._exported: dict[int, PrefixHash] = {}
        """What the worker's side knows."""
        self._orders = Orders()

    def __len__(self) -> int:
        return len(self._tracked)

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    def phase_of(self, request_id: str) -> Phase | None:
        tracked = self._tracked.get(request_id)
        return None if tracked is None else tracked.phase

    def add(self, request: EngineRequest) -> None:
        """A request whose tokens are all that its KV depends on."""
        lineage = self._lineage_of(request.cache_salt)
        if lineage is None:
            return
        names = RequestNames(lineage.naming, request.all_token_ids, request.num_prompt_tokens)
        planned = self._read(request, names, lineage.fidelity) if request.kv_transfer_params else _NO_PLANS
        self._tracked[request.request_id] = _Tracked(request, lineage, names, planned, owes_report=bool(planned))

    def match(self, request_id: str, computed_tokens: int) -> int | None:
        """Tokens that would come beyond `computed_tokens`; None when that is to be asked again. Changes nothing that
        another call would not."""
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.phase not in (Phase.LOOKED_UP, Phase.CLAIMED):
            return 0
        claim = _claim(tracked.planned, computed_tokens // self._size, self._size)
        if claim is None:
            return 0
        ahead = self._arriving.get((tracked.key, tracked.names.name(claim.first_block)))
        if ahead is not None and ahead != request_id:
            tracked.waits_for = ahead
            return None
        tracked.phase, tracked.claim = Phase.CLAIMED, claim
        return (claim.end_block - claim.first_block) * self._size

    def allocated(self, request_id: str, blocks: Sequence[int], external_tokens: int) -> None:
        """The engine has given a request all of `blocks`, so many tokens of them to be loaded."""
        tracked = self._tracked.get(request_id)
        if external_tokens:
            self._load(request_id, tracked, blocks, external_tokens)
        elif tracked is not None and tracked.phase in (Phase.LOOKED_UP, Phase.CLAIMED):
            tracked.phase = Phase.DONE

    def abandon(self, request_id: str) -> None:
        """Have a load fail at once: the engine waits for an answer."""
        self._orders.loads.append(LoadOrder(request_id, None, Fidelity.EXACT, ()))

    def step(self, scheduled: Iterable[Scheduled], table_of: Callable[[str], Sequence[int]]) -> Orders:
        """What the worker's side is told with this step. `table_of` gives all blocks of a request."""
        dropped: list[int] = []
        for request_id, blocks, begins, computed_tokens in scheduled:
            tracked = self._tracked.get(request_id)
            dropped += blocks[computed_tokens // self._size :] if begins else blocks
            if tracked is None:
                continue
            if begins:
                self._arrived(tracked)
                self._report_unmoved(tracked)
                tracked.exported = 0
            else:
                self._export(tracked, computed_tokens, partial(table_of, request_id))
            tracked.computed_once = True
        self._drop(dropped)
        orders, self._orders = self._orders, Orders()
        return orders

    def received(self, request_ids: Iterable[str], failed_ids: Collection[str]) -> None:
        """Loads are over; well, but for those in `failed_ids`."""
        for request_id in request_ids:
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.phase is not Phase.LOADING:
                continue
            tracked.phase = Phase.FAILED if request_id in failed_ids else Phase.DONE
            if tracked.phase is Phase.FAILED:
                self._arrived(tracked)
                self._fail_those_who_wait(request_id)

    def finish(self, request_id: str, blocks: Sequence[int]) -> None:
        """A request has ended, in whatever way; `blocks` are those whose tokens count as computed."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return
        self._arrived(tracked)
        if tracked.phase is Phase.LOADING:
            self._orders.cancelled.append(request_id)
        elif tracked.computed_once:
            self._export(tracked, tracked.request.num_computed_tokens, lambda: blocks)

    def clear(self) -> None:
        """The engine has forgotten all prefixes."""
        self._exported.clear()
        self._orders.exported.clear()
        self._orders.cleared = True
        for tracked in self._tracked.values():
            tracked.exported = 0

    # ---- loads -------------------------------------------------------------------------------------------------------

    def _load(self, request_id: str, tracked: _Tracked | None, blocks: Sequence[int], external_tokens: int) -> None:
        claim = None if tracked is None else tracked.claim
        if tracked is None or claim is None or external_tokens != (claim.end_block - claim.first_block) * self._size:
            self.abandon(request_id)
            return
        self._drop(blocks[claim.first_block :])
        runs = [RunOrder(pull, first, tuple(blocks[first:end])) for pull, first, end in claim.runs]
        planned = tracked.planned
        fusing = self._fusing(tracked, claim, blocks) if claim.passages else None
        fidelity = tracked.lineage.fidelity
        order = LoadOrder(request_id, tracked.key, fidelity, runs, fusing, planned.key, planned.refused)
        self._orders.loads.append(order)
        tracked.phase, tracked.owes_report = Phase.LOADING, False
        for number in range(claim.first_block, claim.end_block):
            self._arriving[tracked.key, tracked.names.name(number)] = request_id

    def _fusing(self, tracked: _Tracked, claim: Claim, blocks: Sequence[int]) -> Fusing:
        tokens = pack_tokens(tracked.names.token_ids)
        filled = tuple(blocks[: claim.end_block])
        return Fusing(claim.passages, tokens, filled, claim.runs_end_block, tracked.planned.fraction)

    def _arrived(self, tracked: _Tracked) -> None:
        """Nobody needs to wait for it any more."""
        claim = tracked.claim
        if claim is None:
            return
        for number in range(claim.first_block, claim.end_block):
            key = tracked.key, tracked.names.name(number)
            if self._arriving.get(key) == tracked.request.request_id:
                del self._arriving[key]
        tracked.claim = None

    def _fail_those_who_wait(self, request_id: str) -> None:
        for tracked in self._tracked.values():
            if tracked.waits_for == request_id and tracked.phase in (Phase.LOOKED_UP, Phase.CLAIMED):
                tracked.phase = Phase.FAILED

    def _report_unmoved(self, tracked: _Tracked) -> None:
        if tracked.owes_report:
            planned, failed = tracked.planned, tracked.phase is Phase.FAILED
            self._orders.unmoved.append(Unmoved(planned.key, tracked.lineage.fidelity, planned.refused, failed))
            tracked.owes_report = False

    # ---- exports -----------------------------------------------------------------------------------------------------

    def _export(self, tracked: _Tracked, computed_tokens: int, table: Callable[[], Sequence[int]]) -> None:
        full = min(computed_tokens, len(tracked.request.all_token_ids)) // self._size
        if full <= tracked.exported:
            return
        blocks = table()[:full]
        names, first = tracked.names, tracked.exported
        chain = names.named(len(blocks))
        listed = [PrefixHash(chain[at : at + HASH_BYTES]) for at in range(0, len(chain), HASH_BYTES)]
        while first < len(blocks) and self._exported.get(blocks[first]) == listed[first]:
            first += 1
        tracked.exported = len(blocks)
        if first == len(blocks):
            return
        self._exported.update(zip(blocks[first:], listed[first:], strict=True))
        export = Export(
            tracked.key,
            tracked.lineage.fidelity,
            names.parent_of(first),
            first,
            chain[first * HASH_BYTES :],
            pack_tokens(names.tokens(first, len(blocks))),
            tuple(blocks[first:]),
        )
        self._orders.exported.append(export)

    def _drop(self, blocks: Iterable[int]) -> None:
        """Given to somebody, who will write to them. Those that the worker's side does not know are not mentioned."""
        known = [block for block in blocks if self._exported.pop(block, None) is not None]
        self._orders.dropped.extend(known)


def _claim(planned: Planned, first_block: int, size: int) -> Claim | None:
    """The runs, or ends of them, that follow on block `first_block` without a gap; then passages, with any gaps."""
    runs, end = [], first_block
    for pull in planned.pulls:
        run = pull.plan.run
        run_end = run.first_block + run.blocks
        if run.first_block <= end < run_end:
            runs.append((pull, end, run_end))
            end = run_end
    passages, end_token = [], end * size
    for pull in planned.passages:
        if pull.plan.target_position >= end_token:
            passages.append(pull)
            end_token = pull.plan.target_position + pull.plan.run.blocks * size
    if end_token // size > end:
        return Claim(first_block, runs, passages, end_token // size)
    return Claim(first_block, runs, (), end) if runs else None
