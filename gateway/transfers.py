"""Pulls: who could give what to whom, the plans that say so to workers, and what is learned from their reports.

    match ─► Transfers.pulls ─► a policy weighs (policies.transfer) ─► WorkerView.pull ─► Transfers.plan ─► the body
    the answer's headers ─► Transfers.answered ─► link estimates, pauses, metrics, the receipt

Only holders that their own events confirm are pulled from, only within one compatibility class, and only as what the
request accepts. A plan is signed for one target in one life; it is advice, and whoever cannot follow it computes.
"""

import logging
import re
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

import orjson

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash
from cachecore.holders import Holder, Worker
from cachecore.index.contract import NO_MATCH, Match
from cachecore.scope import Fidelity, KeyId, Keyring
from cachecore.transfer.capability import Run
from cachecore.transfer.errors import TransferError
from cachecore.transfer.plan import PARAMETER, PLANS_MAX, Grant, Plan, sign
from gateway.edge.http1 import Headers
from gateway.fleet.engines.contract import TransferAbility
from gateway.fleet.pools import PoolKnowledge, PoolMatch
from gateway.fleet.worker import ModelPool, WorkerRecord
from gateway.requests import FIDELITIES, FIDELITY_HEADER, Request
from gateway.views.transfers import TransferMetrics
from policies.estimates import FleetEstimates, LinkModel
from policies.state.guard import QualityGuard
from policies.state.sources import SourceAccounts
from policies.transfer import Candidate, DeadlineBounds, PullOption, PullReport, Pulls, Supply

logger = logging.getLogger("ropeway.transfers")

REPORT_HEADER = b"x-ropeway-transfer"

SOURCES_MAX = 3
"""Of one class that a decision weighs. Deepest first: the next ones have the same or less."""
CAPABILITY_SECONDS = 60.0
"""What a plan is good for beyond its deadline: requests wait for their turn before they pull."""

RAW = "raw"
_AS_IT_IS = frozenset({RAW})
_COMPRESSIONS = {RAW: 1.0, "i8": 1.94, "fp8": 1.94, "i4h": 3.56, "lm3h": 4.13}
"""Of 16-bit KV, until a report has shown it."""
_NAMES = re.compile(r"[a-z_]{1,32}")


class TransferSettings(NamedTuple):
    fidelity: Fidelity
    """Of requests that do not say."""
    codecs: Sequence[str]
    bounds: DeadlineBounds


class Source(NamedTuple):
    """Whom a pull would come from."""

    name: str
    """The worker's, or `pool:` and the pool's."""
    holder: Holder
    addresses: tuple[str, ...] = ()
    pool: PoolMatch | None = None

    def __str__(self) -> str:
        return self.name


class Identity(NamedTuple):
    """How a request's blocks are named."""

    key_id: KeyId
    root: PrefixHash


class Task(NamedTuple):
    """For which request a plan is made, and who is to carry it out."""

    request_id: str
    target: WorkerRecord
    identity: Identity
    chain: Chain
    block_size_tokens: int
    accepted: Fidelity


class Promise(NamedTuple):
    """The beginning of a request's prompt, which somebody will have computed for its worker."""

    request: Request
    pool: ModelPool
    target: WorkerRecord
    target_rank: int
    blocks: int


class Flight(NamedTuple):
    """A pull that a request was sent with."""

    request_id: str
    option: PullOption
    source: Source
    target: WorkerRecord
    runs: Sequence[Run]
    body: bytes
    """`kv_transfer_params`, as JSON."""


class Transfers:
    """The pulls of one gateway."""

    def __init__(
        self,
        settings: TransferSettings,
        keyring: Keyring,
        workers: Mapping[str, WorkerRecord],
        estimates: FleetEstimates,
        pools: PoolKnowledge | None = None,
        guard: QualityGuard | None = None,
    ) -> None:
        self.settings = settings
        self.guard = guard
        self.metrics = TransferMetrics()
        self.accounts = SourceAccounts()
        self._keyring = keyring
        self._workers = workers
        self._estimates = estimates
        self._pools = pools
        self._lossy_codecs = [codec for codec in settings.codecs if codec != RAW]
        self._bytes_per_token: dict[tuple[str, str], float] = {}
        """By class and codec, as reports have shown it."""

    def document(self) -> dict[str, Any]:
        """For `/status`."""
        return {
            "fidelity": self.settings.fidelity.name.lower(),
            "codecs": list(self.settings.codecs),
            "workers": sorted(record.name for record in self._workers.values() if record.transfer is not None),
            "under_way": len(self.accounts),
            "paused": self.accounts.document(time.monotonic()),
            "moved": self.metrics.document(),
            "pools": {pool.name: runs for pool, runs in self._pools.runs_by_pool().items()} if self._pools else {},
        }

    # Before the decision

    def accepted(self, request: Request, pool: ModelPool, now: float) -> Fidelity:
        """The worst KV that a request may be answered from. Where no lossy codec is good enough for the tenant any
        more, what workers have of it is not either."""
        accepted = self.settings.fidelity if request.fidelity is None else request.fidelity
        if accepted is Fidelity.QUANTIZED and self._lossy_codecs:
            return accepted if self.lossy_codecs(pool.model, request.tenant.id, now) else Fidelity.EXACT
        return accepted

    def lossy_codecs(self, model: str, tenant: str, now: float) -> Sequence[str]:
        """Those that may be planned for the tenant's requests."""
        lossy, guard = self._lossy_codecs, self.guard
        return lossy if guard is None else [codec for codec in lossy if guard.allows(model, tenant, codec, now)]

    def codecs(self, model: str, tenant: str, accepted: Fidelity, now: float) -> Sequence[str]:
        """What KV may travel as, best first."""
        lossy = self.lossy_codecs(model, tenant, now) if accepted > Fidelity.EXACT else ()
        return [codec for codec in self.settings.codecs if codec == RAW or codec in lossy]

    def pulls(
        self, request: Request, pool: ModelPool, chain: Chain, match: Match, prompt_tokens: int, now: float
    ) -> Pulls | None:
        """What could be pulled for a prompt; None when nobody has any of it to give."""
        block = pool.block_size_tokens
        # A full hit still computes its last token, and engines give up that token's whole block.
        cap = max(prompt_tokens - 1, 0) // block
        self._estimates.relax_links(now)
        pools = self._pools.match(chain) if self._pools else ()
        deepest = max(match.depths.values(), default=0)
        for found in pools:
            # How far it goes depends on where one begins.
            deepest = max(deepest, found.end)
        if not deepest:
            return None
        accepted = self.accepted(request, pool, now)
        codecs = self.codecs(pool.model, request.tenant.id, accepted, now)
        offers = _Offers(self, match, pools, block, cap, accepted, codecs, now)
        return Pulls(prompt_tokens, min(deepest, cap) * block, offers, self.settings.bounds)

    def pull_seconds(self, request: Request, pool: ModelPool, now: float, tokens: int) -> float:
        """What it takes to pull so many tokens from one worker of the pool to another, over a usual link."""
        ability = next((worker.transfer for worker in pool.workers if worker.transfer is not None), None)
        if ability is None:
            return inf
        codecs = self.codecs(pool.model, request.tenant.id, self.accepted(request, pool, now), now)
        wire = self.bytes_per_token(ability, codecs[0] if codecs else RAW)
        return self._estimates.link("", "").transfer_seconds(round(tokens * wire))

    def promised(
        self, promise: Promise, source: WorkerRecord, source_rank: int, now: float
    ) -> tuple[Supply, LinkModel] | None:
        """How a worker could give what it computes, whatever its events say of that; None where it cannot."""
        request, pool, target, target_rank, blocks = promise
        accepted = self.accepted(request, pool, now)
        codecs = self.codecs(pool.model, request.tenant.id, accepted, now)
        offers = _Offers(self, NO_MATCH, (), pool.block_size_tokens, blocks, accepted, codecs, now)
        return offers.promised(source, source_rank, target, target_rank)

    def bytes_per_token(self, ability: TransferAbility, codec: str) -> float:
        """On the way, as the codec leaves it."""
        seen = self._bytes_per_token.get((ability.compatibility, codec))
        return seen or ability.bytes_per_token / _COMPRESSIONS.get(codec, 1.0)

    def link(self, source: str, target: str) -> LinkModel:
        return self._estimates.link(source, target)

    def record(self, name: str) -> WorkerRecord | None:
        return self._workers.get(name)

    # The decision's plan

    def plan(self, option: PullOption, task: Task, now: float) -> Flight | None:
        """Sign what was decided. None where it cannot be: then the request goes as if nobody had anything to give."""
        source, block, ability = option.source, task.block_size_tokens, task.target.transfer
        assert isinstance(source, Source)  # noqa: S101
        try:
            runs = _runs(source, task, option.first_token // block, option.end_token // block)
            if ability is None or not runs:
                raise ValueError("nothing to pull, or nobody to pull it")
            expires_at = time.time() + option.deadline_seconds + CAPABILITY_SECONDS
            grant = Grant(task.identity.key_id, ability.holder, task.accepted, expires_at)
            documents = [self._sign(source, run, block, option, grant) for run in runs]
        except (TransferError, ValueError, KeyError) as error:
            logger.warning("no plan to pull from %s to %s: %s", source, task.target.name, error)
            self.metrics.unsigned += 1
            return None
        self.accounts.begin(task.request_id, source.name, option.size_bytes, now + option.load_seconds)
        self.metrics.planned(source.pool is not None, option)
        return Flight(task.request_id, option, source, task.target, runs, orjson.dumps({PARAMETER: documents}))

    def _sign(self, source: Source, run: Run, block: int, option: PullOption, grant: Grant) -> dict[str, Any]:
        position = run.first_block * block
        plan = Plan(source.holder, source.addresses, run, position, position, option.codec, option.deadline_seconds)
        return sign(plan, grant, self._keyring)

    # Its outcome

    def fidelity_header(self, accepted: Fidelity) -> bytes:
        """What a worker that can move KV is told with every request, as a complete header line."""
        return b"%b: %b\r\n" % (FIDELITY_HEADER, accepted.name.lower().encode())

    def answered(self, flight: Flight | None, headers: Headers, now: float) -> PullReport | None:
        """A worker that can move KV has answered: what it says of the pull, if there was one."""
        fidelity = stated = None
        for name, value in headers:
            if name == FIDELITY_HEADER:
                fidelity = FIDELITIES.get(value)
            elif name == REPORT_HEADER:
                stated = value
        if fidelity is not None:
            self.metrics.answers[fidelity] += 1
        if flight is None:
            return None
        self.accounts.end(flight.request_id)
        report = read_report(stated) if stated is not None else PullReport("unreported")
        self._learn(flight, report, now)
        self.metrics.reported(flight.option, report)
        return report

    def abandoned(self, flight: Flight) -> None:
        """Its worker gave no answer."""
        self.accounts.end(flight.request_id)

    def _learn(self, flight: Flight, report: PullReport, now: float) -> None:
        option, source, target = flight.option, flight.source.name, flight.target.name
        if report.outcome == "fetched":
            self.accounts.delivered(source, target)
            self._estimates.observe_link(source, target, option.ahead_bytes + report.size_bytes, report.seconds, now)
            ability = flight.target.transfer
            if ability is not None and report.tokens > 0 and report.size_bytes > 0:
                key = (ability.compatibility, option.codec)
                self._bytes_per_token[key] = report.size_bytes / report.tokens
        elif report.outcome in ("refused", "failed"):
            self.accounts.failed(source, target, report.reason, now)
            if report.reason == "deadline" and option.deadline_seconds > option.load_seconds:
                # It takes at least as long.
                size = option.ahead_bytes + option.size_bytes
                self._estimates.observe_link(source, target, size, option.deadline_seconds, now)
            pool = flight.source.pool
            if pool is not None and self._pools is not None and report.reason == "stale":
                arrived = report.tokens * len(flight.runs) // max(option.tokens, 1)
                self._pools.doubt(pool.kind.holder, flight.runs[min(arrived, len(flight.runs) - 1)].tail)


class _Supplier(NamedTuple):
    """A worker that holds the beginning of a prompt."""

    compatibility: str
    source: Source
    codecs: frozenset[str]
    blocks: int
    fidelity: Fidelity
    ahead_bytes: int


class _Offers:
    """Who could give what to one candidate: called by `Pulls`, for as few as can be, and for none most of the time."""

    __slots__ = (
        "_accepted",
        "_ahead",
        "_block",
        "_by_class",
        "_cap",
        "_codecs",
        "_match",
        "_now",
        "_pools",
        "_transfers",
    )

    def __init__(
        self,
        transfers: Transfers,
        match: Match,
        pools: Sequence[PoolMatch],
        block: int,
        cap: int,
        accepted: Fidelity,
        codecs: Sequence[str],
        now: float,
    ) -> None:
        self._transfers = transfers
        self._match = match
        self._pools = pools
        self._block = block
        self._cap = cap
        self._accepted = accepted
        self._codecs = codecs
        self._now = now
        self._ahead: Mapping[Hashable, int] = {}
        self._by_class: dict[str, list[_Supplier]] | None = None

    def __call__(self, view: Candidate) -> Sequence[tuple[Supply, LinkModel]]:
        if self._by_class is None:
            self._ahead = self._transfers.accounts.ahead_bytes(self._now)
            self._by_class = self._suppliers()
        record = self._transfers.record(view.name)
        ability = record.transfer if record is not None else None
        if record is None or ability is None or not self._speaks_for(record, ability, view.rank):
            return ()
        found = self._of_workers(self._by_class.get(ability.compatibility, ()), record, ability)
        return [*found, *self._of_pools(record, ability, view.confirmed_tokens)] if self._pools else [*found]

    def promised(
        self, source: WorkerRecord, source_rank: int, target: WorkerRecord, target_rank: int
    ) -> tuple[Supply, LinkModel] | None:
        """Of one worker to another, as if it held all of it, and held it exact."""
        ability = target.transfer
        if ability is None or not self._speaks_for(target, ability, target_rank):
            return None
        self._ahead = self._transfers.accounts.ahead_bytes(self._now)
        supplier = self._supplier_at(source, source_rank, self._cap, Fidelity.EXACT)
        if supplier is None or supplier.compatibility != ability.compatibility:
            return None
        return next(iter(self._of_workers((supplier,), target, ability)), None)

    def _suppliers(self) -> dict[str, list[_Supplier]]:
        """Of each class the workers that hold most, and of those that hold as much the ones with the least to send."""
        found: dict[Worker, tuple[int, Fidelity]] = {}
        for (holder, _, fidelity), depth in self._match.depths.items():
            if fidelity <= self._accepted and isinstance(holder, Worker):
                known = found.get(holder)
                if known is None or depth > known[0]:
                    found[holder] = depth, fidelity
        suppliers: dict[str, list[_Supplier]] = {}
        for holder, (depth, fidelity) in sorted(found.items(), key=self._rank):
            supplier = self._supplier(holder, min(depth, self._cap), fidelity)
            if (
                supplier is not None
                and len(known_ones := suppliers.setdefault(supplier.compatibility, [])) < SOURCES_MAX
            ):
                known_ones.append(supplier)
        return suppliers

    def _rank(self, item: tuple[Worker, tuple[int, Fidelity]]) -> tuple[int, int]:
        holder, (depth, _) = item
        return -depth, self._ahead.get(holder.name, 0)

    def _supplier(self, holder: Worker, blocks: int, fidelity: Fidelity) -> _Supplier | None:
        record = self._transfers.record(holder.name)
        if record is None or not record.vouches_for(holder):
            return None
        return self._supplier_at(record, holder.rank, blocks, fidelity)

    def _supplier_at(self, record: WorkerRecord, rank: int, blocks: int, fidelity: Fidelity) -> _Supplier | None:
        ability = record.transfer
        if ability is None or not ability.addresses or not blocks or not self._speaks_for(record, ability, rank):
            return None
        source = Source(record.name, ability.holder, ability.addresses)
        ahead = self._ahead.get(record.name, 0)
        return _Supplier(ability.compatibility, source, ability.codecs, blocks, fidelity, ahead)

    def _speaks_for(self, record: WorkerRecord, ability: TransferAbility, rank: int) -> bool:
        """Names of blocks mean something to a worker whose blocks are the pool's, and it speaks for one rank."""
        return ability.holder.rank == rank and record.block_size_tokens == self._block

    def _of_workers(
        self, suppliers: Iterable[_Supplier], target: WorkerRecord, ability: TransferAbility
    ) -> Iterable[tuple[Supply, LinkModel]]:
        for _, source, codecs, blocks, fidelity, ahead in suppliers:
            common = codecs & ability.codecs
            if fidelity > Fidelity.EXACT:
                common &= _AS_IT_IS  # nothing is quantized twice
            codec = self._codec(common)
            if source.name == target.name or codec is None or self._paused(source, target):
                continue
            if not ability.reaches(source.addresses):
                continue
            delivered = fidelity if codec == RAW else max(fidelity, Fidelity.QUANTIZED)
            wire = self._transfers.bytes_per_token(ability, codec)
            supply = Supply(source, blocks * self._block, delivered, codec, wire, ahead)
            yield supply, self._transfers.link(source.name, target.name)

    def _of_pools(
        self, target: WorkerRecord, ability: TransferAbility, confirmed_tokens: int
    ) -> Iterable[tuple[Supply, LinkModel]]:
        first = confirmed_tokens // self._block
        opened = {(pool.name, pool.generation) for pool in ability.pools}
        for match in self._pools:
            kind = match.kind
            if (
                kind.compatibility != ability.compatibility
                or kind.codec not in self._codecs
                or kind.holder not in opened
            ):
                continue
            if kind.fidelity > self._accepted:
                continue
            source = Source(f"pool:{kind.holder.name}", kind.holder, (), match)
            blocks = min(match.reach(first), self._cap)
            if blocks <= first or self._paused(source, target):
                continue
            wire = self._transfers.bytes_per_token(ability, kind.codec)
            ahead = self._ahead.get(source.name, 0)
            supply = Supply(source, blocks * self._block, kind.fidelity, kind.codec, wire, ahead)
            yield supply, self._transfers.link(source.name, target.name)

    def _codec(self, common: frozenset[str]) -> str | None:
        for codec in self._codecs:
            if codec in common:
                return codec
        return None

    def _paused(self, source: Source, target: WorkerRecord) -> bool:
        return self._transfers.accounts.paused(source.name, target.name, self._now)


def _runs(source: Source, task: Task, first_block: int, end_block: int) -> list[Run]:
    """Raises ValueError where the source does not hold what was decided."""
    chain, root = task.chain, task.identity.root
    if source.pool is not None:
        return source.pool.runs(chain, root, first_block, end_block)[:PLANS_MAX]
    names = root + chain
    if not 0 <= first_block < end_block <= len(chain) // HASH_BYTES:
        raise ValueError(f"no run from block {first_block} to {end_block}")
    parent, tail = (PrefixHash(names[at * HASH_BYTES : (at + 1) * HASH_BYTES]) for at in (first_block, end_block))
    return [Run(parent, tail, first_block, end_block - first_block)]


def read_report(value: bytes) -> PullReport:
    """Whatever a worker writes there. What does not parse says nothing."""
    fields: dict[str, str] = {}
    for part in value.decode("latin-1").split(";"):
        name, _, text = part.partition("=")
        fields[name.strip()] = text.strip()
    outcome, reason = fields.get("outcome", ""), fields.get("reason", "")
    try:
        numbers = int(fields.get("tokens", "0")), int(fields.get("bytes", "0")), float(fields.get("seconds", "0"))
    except ValueError:
        return PullReport("malformed")
    if not _NAMES.fullmatch(outcome) or (reason and not _NAMES.fullmatch(reason)) or min(numbers[:2]) < 0:
        return PullReport("malformed")
    return PullReport(outcome, reason, *numbers)
