"""Which plans of a request are carried out. The one place where a plan is refused.

A plan is advice from whoever could write the request: it counts when its capability signs all of it, for this worker,
and when it fits the request itself: the tenant, the tokens, and the fidelity that is accepted. Runs of the prompt's own
chain become its blocks; runs of other chains that say the same become passages, to be repaired. Whatever is wrong with
a plan, the request is answered all the same, with that part computed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from cachecore.blocks import HASH_BYTES, Chain, pack_tokens
from cachecore.holders import Holder
from cachecore.scope import Fidelity, KeyId, Keyring, Naming
from cachecore.transfer.errors import PlanError, Reason, TransferError
from cachecore.transfer.plan import FRACTION_PARAMETER, PARAMETER, PLANS_MAX, Pull, read_plan
from workers.engine import Generation, TransferMetrics
from workers.transfer.loads import best_of
from workers.transfer.report import PullLog


class NamedTokens(Protocol):
    """A prompt, as plans are held against it."""

    @property
    def naming(self) -> Naming: ...

    @property
    def prompt_count(self) -> int: ...

    def named(self, blocks: int) -> Chain:
        """The names of the first `blocks` full blocks."""
        ...


class ReadableTokens(NamedTokens, Protocol):
    """One whose tokens can be looked at."""

    @property
    def token_ids(self) -> Sequence[int]: ...


class PlannedPrompt(NamedTokens, Protocol):
    """One that plans come with, and are left with."""

    generation: Generation
    token_ids: list[int]
    pulls: Sequence[Pull]
    passages: Sequence[Pull]
    recompute_fraction: float | None
    pull_log: PullLog | None


class PlanReader:
    """Reads the plans of requests for one worker in one life."""

    def __init__(
        self,
        keyring: Keyring,
        holder: Holder,
        codecs: Sequence[str],
        metrics: TransferMetrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._keyring = keyring
        self.holder = holder
        self.codecs = codecs
        self._metrics = metrics
        self._clock = clock

    def read(self, sequence: PlannedPrompt) -> None:
        """Leave with the sequence the pulls that may be carried out, by position, and a log of all that were asked."""
        documents = documents_of(sequence.generation)
        if not documents:
            return
        log = sequence.pull_log = PullLog(self._metrics)
        pulls: list[Pull] = []
        passages: list[Pull] = []
        for document in documents[:PLANS_MAX]:
            try:
                pull = self.checked(document, sequence.naming.scope.key_id, sequence.generation.fidelity)
                (pulls if self._is_own(pull, sequence) else passages).append(pull)
            except TransferError as error:
                log.refuse(error.reason)
        sequence.pulls = sorted(pulls, key=lambda pull: pull.plan.run.first_block)
        sequence.passages = sorted(passages, key=lambda pull: pull.plan.target_position)
        sequence.recompute_fraction = fraction_of(sequence.generation)

    def checked(self, document: object, key_id: KeyId, accepted: Fidelity) -> Pull:
        """A plan for this worker, for a request of `key_id` that accepts KV of a fidelity.

        Raises PlanError or CapabilityError.
        """
        pull = read_plan(document, self._keyring, self.holder, self._clock())
        plan, capability = pull.plan, pull.capability
        if capability.key_id != key_id:
            raise PlanError(f"a plan for {capability.key_id}; the request is of {key_id}", Reason.OTHER_TENANT)
        if plan.codec not in self.codecs:
            raise PlanError(f"codec {plan.codec} is not taken here", Reason.INCOMPATIBLE)
        if best_of(plan.codec) > min(accepted, capability.fidelity):
            raise PlanError(f"a plan for {plan.codec}; the request accepts no such KV", Reason.UNEXPECTED)
        return pull

    def _is_own(self, pull: Pull, sequence: PlannedPrompt) -> bool:
        """Whether the run is of the prompt's own chain, or else of one that says what the prompt says where it is
        wanted. Raises PlanError for any other."""
        if is_part_of(pull, sequence):
            if pull.plan.source == self.holder:
                raise PlanError("a plan to pull from oneself", Reason.OTHER_SOURCE)
            return True
        if not is_said_by(pull, sequence):
            raise PlanError("a plan for another prompt", Reason.UNEXPECTED)
        if min(sequence.generation.fidelity, pull.capability.fidelity) < Fidelity.FUSED:
            raise PlanError("a run of another position; the request accepts no such KV", Reason.UNEXPECTED)
        return False


def fraction_of(generation: Generation) -> float | None:
    """Of passages' tokens, what is to be recomputed; None where nothing sensible is said."""
    return fraction_in(generation.kv_transfer_params or {})


def fraction_in(params: Mapping[str, Any]) -> float | None:
    given = params.get(FRACTION_PARAMETER)
    return float(given) if isinstance(given, int | float) and 0.0 <= given <= 1.0 else None


def documents_of(generation: Generation) -> Sequence[object]:
    """The plans as they came, whatever they are."""
    given = (generation.kv_transfer_params or {}).get(PARAMETER)
    return given if isinstance(given, list) else []


def is_part_of(pull: Pull, sequence: NamedTokens) -> bool:
    """Whether the run is a part of the prompt, by the names that its tokens have here."""
    run, size = pull.plan.run, sequence.naming.scope.block_size_tokens
    end, position = run.first_block + run.blocks, run.first_block * size
    if {pull.plan.source_position, pull.plan.target_position} != {position} or end * size > sequence.prompt_count:
        return False
    chain = sequence.named(end)
    start = run.first_block * HASH_BYTES
    parent = chain[start - HASH_BYTES : start] if start else sequence.naming.root
    return (parent, chain[-HASH_BYTES:]) == (run.parent, run.tail)


def is_said_by(pull: Pull, sequence: ReadableTokens) -> bool:
    """Whether the prompt says at the run's target what the run says, and goes on behind it.

    Names are chained and keyed: the run's last one follows from the name before the run and just these tokens.
    """
    plan, size = pull.plan, sequence.naming.scope.block_size_tokens
    end = plan.target_position + plan.run.blocks * size
    if end >= sequence.prompt_count or plan.source_position != plan.run.first_block * size:
        return False
    tokens = pack_tokens(sequence.token_ids[plan.target_position : end])
    return sequence.naming.hasher.chain(plan.run.parent, tokens)[-HASH_BYTES:] == plan.run.tail
