"""Passages of a prompt that are held somewhere at another position, and which of them are worth turning.

    tokens ─► fingerprints at every offset ─► held texts ─► runs: of one chain, at one place ─► what saves time ─► plans

A fingerprint is a guess. A run is what a chain says: from the name before a held block and the prompt's own tokens its
names are computed again, and a block belongs to the run if the place holds that very name. So no run is planned whose
tokens are others, and a run is as long as the holder has the prompt's text in a row.

Runs do not overlap. They are taken from the left, the longest at each offset; the worker itself goes before others.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from cachecore.blocks import TOKEN_BYTES, PrefixHash
from cachecore.holders import Holder, Place, Worker
from cachecore.index.content import MemoryContentIndex
from cachecore.index.content_feed import ContentFeed
from cachecore.index.contract import ContentHolding
from cachecore.scope import Fidelity, Keyring, Naming
from cachecore.transfer.capability import Run
from cachecore.transfer.errors import TransferError
from cachecore.transfer.plan import FRACTION_PARAMETER, PARAMETER, PLANS_MAX, Grant, Plan, sign
from gateway.fleet.engines.contract import TransferAbility
from gateway.fleet.worker import ModelPool, WorkerRecord
from gateway.requests import Request
from gateway.transfers import CAPABILITY_SECONDS, RAW, Transfers
from policies.state.guard import FUSED
from policies.transfer import PrefillSeconds

logger = logging.getLogger("ropeway.transfers")

RECOMPUTE_FRACTION = 0.15
"""By workers' own choice."""
REPAIR_SHARE = 0.02
"""What propagation costs besides, as a share of computing the same tokens."""
QUESTION_TOKENS_MAX = 64
"""Of what follows the runs, the fuser asks so much which tokens to recompute: it is run twice."""

_PATIENCE = 4.0
PROMPT_TOKENS_MAX = 16_384
"""Longer ones are left alone: their tokens would be wanted once more, while other requests wait."""
_HOLDINGS_MAX = 16
_EXTENSIONS_MAX = 512
"""For one prompt. A text that repeats itself is held at every offset of itself."""


class ShiftedRun(NamedTuple):
    """Consecutive blocks of a chain that say what a prompt says from `target_position` on."""

    place: Place
    run: Run
    source_position: int
    target_position: int
    tokens: int


class Passages:
    """Finds runs of one prompt."""

    def __init__(self, contents: ContentFeed, naming: Naming, tokens: bytes) -> None:
        """`tokens`: `pack_tokens` of all of the prompt but its last, whose logits are needed."""
        self._index = contents.index
        self._fingerprinter = contents.fingerprinter(naming)
        self._hasher = naming.hasher
        self._tokens = tokens
        self._extensions = 0

    def find(self, start: int, usable: Callable[[Holder], bool], target: Holder) -> list[ShiftedRun]:
        """Runs behind the first `start` tokens, from holders that can be pulled from, or from the target itself."""
        runs: list[ShiftedRun] = []
        end = start
        for offset in self._hits(start):
            if offset < end or self._extensions > _EXTENSIONS_MAX:
                continue
            run = self._longest(offset, usable, target)
            if run is not None:
                runs.append(run)
                end = offset + run.tokens
        return runs

    def _hits(self, start: int) -> Iterator[int]:
        """Offsets at which a held text may begin."""
        resolve = self._index.resolve
        windows = self._fingerprinter.windows(memoryview(self._tokens)[start * TOKEN_BYTES :]).tolist()
        return (offset for offset, value in enumerate(windows, start) if resolve(value) is not None)

    def _longest(self, offset: int, usable: Callable[[Holder], bool], target: Holder) -> ShiftedRun | None:
        size = self._hasher.block_size_tokens
        window = self._tokens[offset * TOKEN_BYTES : (offset + size) * TOKEN_BYTES]
        [content] = self._hasher.contents(window)
        best: tuple[tuple[int, bool, int], ContentHolding, PrefixHash] | None = None
        for holding in self._index.find(content, _HOLDINGS_MAX):
            holder = holding.place.holder
            if holder != target and not usable(holder):
                continue
            blocks, tail = self._extended(offset, holding)
            rank = blocks, holder == target, -holding.place.tier
            if blocks and (best is None or rank > best[0]):
                best = rank, holding, tail
        if best is None:
            return None
        (blocks, _, _), holding, tail = best
        run = Run(holding.parent, tail, holding.position_blocks, blocks)
        return ShiftedRun(holding.place, run, holding.position_blocks * size, offset, blocks * size)

    def _extended(self, offset: int, holding: ContentHolding) -> tuple[int, PrefixHash]:
        """How many blocks from this one on the place holds in a row, and the last one's name."""
        self._extensions += 1
        step, start = self._hasher.block_bytes, offset * TOKEN_BYTES
        blocks, tail = 0, holding.parent
        while len(block := self._tokens[start : start + step]) == step:
            name = PrefixHash(self._hasher.chain(tail, block))
            if (holding.place, name) not in self._index:
                break
            blocks, tail, start = blocks + 1, name, start + step
        return blocks, tail


def worthwhile(
    runs: Sequence[ShiftedRun],
    prompt_tokens: int,
    start: int,
    prefill: PrefillSeconds,
    load_seconds: Callable[[ShiftedRun], float],
    fraction: float = RECOMPUTE_FRACTION,
) -> tuple[list[ShiftedRun], float]:
    """The runs that bring the first token sooner, and by how many seconds: each saves more than it takes to load, and
    all together more than asking the question once more. `load_seconds` of a run; nothing for one of the worker's own.
    """
    kept_share = _kept_share(fraction)
    everything = prefill.prefill_seconds(prompt_tokens - start, start)

    def saved(tokens: int) -> float:
        kept = round(tokens * kept_share)
        return everything - prefill.prefill_seconds(prompt_tokens - start - kept, start + kept)

    chosen = [run for run in runs if saved(run.tokens) > load_seconds(run)]
    if not chosen:
        return [], 0.0
    behind = prompt_tokens - chosen[-1].target_position - chosen[-1].tokens
    question = min(behind, QUESTION_TOKENS_MAX)
    asking = prefill.prefill_seconds(question, prompt_tokens - question)
    gained = saved(sum(run.tokens for run in chosen)) - sum(map(load_seconds, chosen)) - asking
    return (chosen, gained) if gained > 0.0 else ([], 0.0)


def _kept_share(fraction: float) -> float:
    """Of turned tokens, what need not be computed."""
    return max(0.0, 1.0 - fraction - REPAIR_SHARE)


@dataclass(slots=True)
class PassageMetrics:
    """What was planned; counters only grow."""

    prompts: int = 0
    runs: int = 0
    tokens: int = 0

    def sent(self, plans: "PassagePlans") -> None:
        self.prompts += 1
        self.runs += len(plans.documents)
        self.tokens += plans.tokens


class Asked(NamedTuple):
    """A request whose worker has been chosen."""

    request: Request
    pool: ModelPool
    naming: Naming
    tokens: bytes
    """`pack_tokens` of the whole prompt."""
    start: int
    """Behind what the worker has, or pulls, of the prompt's own chain."""
    target: WorkerRecord
    rank: int
    prefill: PrefillSeconds
    """Of the target."""


class PassagePlans(NamedTuple):
    """What a request is sent with in place of a pull of its own chain, of which a run may be among them."""

    documents: Sequence[dict[str, Any]]
    """Signed, by target position."""
    tokens: int
    fraction: float
    """Of them, what is to be recomputed."""
    prefill_seconds: float
    """What is left to compute, all in all."""
    saved_seconds: float
    """How much sooner than by computing alone the first token is expected."""

    @property
    def body(self) -> bytes | None:
        """`kv_transfer_params`, as JSON."""
        if not self.documents:
            return None
        return orjson.dumps({PARAMETER: self.documents, FRACTION_PARAMETER: self.fraction})


NO_PASSAGES = PassagePlans((), 0, RECOMPUTE_FRACTION, 0.0, 0.0)


class PassagePlanner:
    """Finds, weighs and signs; decides nothing else: the worker is the policy's choice."""

    def __init__(self, contents: ContentFeed, transfers: Transfers, keyring: Keyring) -> None:
        self.metrics = PassageMetrics()
        self._contents = contents
        self._transfers = transfers
        self._keyring = keyring

    @property
    def index(self) -> MemoryContentIndex:
        return self._contents.index

    def plans(self, asked: Asked, now: float) -> PassagePlans:
        """For a request that accepts `fused`; none for any other."""
        transfers, request, ability = self._transfers, asked.request, asked.target.transfer
        accepted = transfers.accepted(request, asked.pool, now)
        if accepted < Fidelity.FUSED or ability is None or not ability.shifted or not len(self._contents.index):
            return NO_PASSAGES
        model, tenant, guard = asked.pool.model, request.tenant.id, transfers.guard
        if guard is not None and not guard.allows(model, tenant, FUSED, now):
            return NO_PASSAGES
        fraction = RECOMPUTE_FRACTION if guard is None else guard.recompute_fraction(model, tenant)
        sources = _Sources(transfers, asked, ability, transfers.codecs(model, tenant, accepted, now), now)
        all_but_last = asked.tokens[:-TOKEN_BYTES]
        found = Passages(self._contents, asked.naming, all_but_last).find(asked.start, sources.usable, sources.holder)
        count = len(asked.tokens) // TOKEN_BYTES
        found = found[:PLANS_MAX]
        runs, saved = worthwhile(found, count, asked.start, asked.prefill, sources.load_seconds, fraction)
        if not runs:
            return NO_PASSAGES
        try:
            documents = self._sign(runs, sources, asked, accepted)
        except (TransferError, KeyError) as error:
            logger.warning("no plan to turn passages on %s: %s", asked.target.name, error)
            return NO_PASSAGES
        turned = sum(run.tokens for run in runs)
        computed = count - asked.start - round(turned * _kept_share(fraction))
        prefill_seconds = asked.prefill.prefill_seconds(computed, count - computed)
        return PassagePlans(documents, turned, fraction, prefill_seconds, saved)

    def _sign(
        self, runs: Sequence[ShiftedRun], sources: "_Sources", asked: Asked, accepted: Fidelity
    ) -> list[dict[str, Any]]:
        documents = []
        for run in runs:
            plan = sources.plan(run)
            expires_at = time.time() + plan.deadline_seconds + CAPABILITY_SECONDS
            grant = Grant(asked.naming.scope.key_id, sources.ability.holder, accepted, expires_at)
            documents.append(sign(plan, grant, self._keyring))
        return documents


class _Sources:
    """Whom one worker can have passages from: itself, and confirmed holders of its class."""

    def __init__(
        self, transfers: Transfers, asked: Asked, ability: TransferAbility, codecs: Sequence[str], now: float
    ) -> None:
        self.ability = ability
        self.holder = asked.target.holder(asked.rank)
        self._target = asked.target
        self._block = asked.pool.block_size_tokens
        self._transfers = transfers
        self._codecs = codecs
        self._now = now

    def usable(self, holder: Holder) -> bool:
        """The target itself is, whoever else is asked."""
        record = self._transfers.record(holder.name) if isinstance(holder, Worker) else None
        ability = record.transfer if record is not None else None
        if record is None or ability is None or not isinstance(holder, Worker) or record.name == self._target.name:
            return False
        comparable = ability.compatibility == self.ability.compatibility and record.block_size_tokens == self._block
        serves = bool(ability.addresses) and ability.holder.rank == holder.rank and self._codec(ability) is not None
        reachable = serves and self.ability.reaches(ability.addresses)
        paused = self._transfers.accounts.paused(record.name, self._target.name, self._now)
        return record.vouches_for(holder) and comparable and reachable and not paused

    def load_seconds(self, run: ShiftedRun) -> float:
        if run.place.holder == self.holder:
            return 0.0
        ability, codec = self._of(run)
        size = round(run.tokens * self._transfers.bytes_per_token(ability, codec))
        return self._transfers.link(run.place.holder.name, self._target.name).transfer_seconds(size)

    def plan(self, run: ShiftedRun) -> Plan:
        bounds = self._transfers.settings.bounds
        positions = run.source_position, run.target_position
        if run.place.holder == self.holder:
            return Plan(self.ability.holder, (), run.run, *positions, RAW, bounds.seconds_max)
        ability, codec = self._of(run)
        # Everything waits for the last of them: a passage is given up for good when it takes several times as long.
        deadline = min(max(_PATIENCE * self.load_seconds(run), bounds.seconds_min), bounds.seconds_max)
        return Plan(ability.holder, ability.addresses, run.run, *positions, codec, deadline)

    def _of(self, run: ShiftedRun) -> tuple[TransferAbility, str]:
        """What a usable holder can do, and the codec for its run."""
        record = self._transfers.record(run.place.holder.name)
        ability = record.transfer if record is not None else None
        codec = self._codec(ability) if ability is not None else None
        if ability is None or codec is None:
            raise KeyError(f"{run.place.holder} is not there any more")
        exact = run.place.fidelity is Fidelity.EXACT
        return ability, codec if exact else RAW  # what was quantized once goes as it is

    def _codec(self, ability: TransferAbility) -> str | None:
        return next((c for c in self._codecs if c in ability.codecs and c in self.ability.codecs), None)
