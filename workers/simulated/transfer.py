"""Plans as the simulated worker carries them out: it asks the source for a run, waits for as long as the run would
take, and has its blocks.

What the reference worker does to be sure of what it gets is done here, too, as far as there is something to check: the
plan's signature, that it is meant for this worker in this life, and that the run is one of this very prompt.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from cachecore.blocks import PrefixHash
from cachecore.holders import Epoch, Worker, WorkerName
from cachecore.index.schema import holder_id
from cachecore.prompts.contract import Renderer
from cachecore.scope import Fidelity, IdentityScope, Keyring, Naming, Salt
from cachecore.transfer.capability import Capability
from cachecore.transfer.errors import Reason, TransferError
from cachecore.transfer.plan import PARAMETER, Pull, read_plan
from cachecore.transfer.transport import Refused
from workers.engine import EngineInfo, Generation, TransferInfo, TransferMetrics, TransferOutcome, TransferReport
from workers.simulated.cache import Held
from workers.simulated.link import CODECS, Delivered, LinkConfig, ModelledSource, bytes_per_token, fetch
from workers.simulated.scheduler import Lineage, Scheduler, Work
from workers.timing import TimingProfile

_LINEAGES_MAX = 4096
_RAW = "raw"


class Served(NamedTuple):
    """Whose transfers these are."""

    info: EngineInfo
    profile: TimingProfile
    speed: float
    renderer: Renderer
    scheduler: Scheduler


class Endpoint(NamedTuple):
    """Where a worker serves KV, and what plans call it; by its address where it has no other name."""

    instance: str = ""
    host: str = "127.0.0.1"
    port: int = 0


class Transfers:
    """What one simulated worker pulls and serves."""

    def __init__(self, link: LinkConfig, keyring: Keyring, served: Served) -> None:
        self.metrics = TransferMetrics()
        self.endpoint = Endpoint()
        """To be set before `start`."""
        self._link = link
        self._keyring = keyring
        self._served = served
        self._token_bytes = bytes_per_token(served.profile)
        self._lineages: dict[tuple[str, str], Lineage] = {}
        self._arriving: dict[PrefixHash, asyncio.Future[None]] = {}
        self.source = ModelledSource(
            link,
            served.speed,
            self._token_bytes,
            served.info.block_size_tokens,
            keyring,
            self._trace,
            self.metrics,
        )

    async def start(self) -> TransferInfo:
        """Serve. Raises OSError."""
        instance, host, port = self.endpoint
        address = await self.source.start(host, port)
        self.source.holder = Worker(WorkerName(instance or address), Epoch(self._served.info.epoch), 0)
        facts = (self._served.info.model, self._served.profile.name, self._link.kv_class)
        compatibility = blake2b(repr(facts).encode(), digest_size=16, person=b"ropeway.sim.v1").hexdigest()
        return TransferInfo(
            holder_id(self.source.holder).decode(), (address,), compatibility, CODECS, self._token_bytes
        )

    async def stop(self) -> None:
        await self.source.stop()

    def _trace(self, capability: Capability) -> Held | None:
        run = capability.run
        return self._served.scheduler.cache.trace(run.tail, run.blocks, capability.fidelity)

    # Names

    def lineage(self, generation: Generation) -> Lineage | None:
        """How the gateway names this prompt's blocks; None for a salt that is not ours."""
        key = generation.cache_salt, generation.adapter
        lineage = self._lineages.get(key)
        if lineage is None:
            salt = self._keyring.read_salt(generation.cache_salt)
            if salt is None:
                return None
            if len(self._lineages) >= _LINEAGES_MAX:
                del self._lineages[next(iter(self._lineages))]
            lineage = self._lineages[key] = self._lineage(salt, generation.adapter)
        return lineage

    def _lineage(self, salt: Salt, adapter: str) -> Lineage:
        scope = IdentityScope(
            self._served.info.model,
            salt.key_id,
            self._served.info.block_size_tokens,
            tokenizer=self._served.renderer.fingerprint,
            adapter=adapter,
            client_salt=salt.client_salt,
        )
        naming = Naming.of(scope, self._keyring)
        minted = {
            fidelity: self._keyring.mint_salt(Salt(salt.key_id, fidelity, salt.client_salt)) for fidelity in Fidelity
        }
        return Lineage(naming.hasher, naming.root, minted.__getitem__)

    # Pulls

    async def load(self, work: Work) -> TransferReport:
        """Carry out the plans of a generation, one after the other, as far as they go well."""
        total = TransferReport(TransferOutcome.HELD)
        for document in plans_of(work.generation.kv_transfer_params):
            report = await self._carry_out(work, document)
            total = _joined(total, report)
            self.metrics.pulls[(report.outcome, report.reason)] += 1
            if report.reason:
                break
        self.metrics.pulled_tokens += total.tokens
        self.metrics.pulled_bytes += total.payload_bytes
        return total

    async def _carry_out(self, work: Work, document: object) -> TransferReport:
        holder = self.source.holder
        assert holder is not None  # noqa: S101
        try:
            pull = read_plan(document, self._keyring, holder, time.time())
        except TransferError as error:
            return _refused(error.reason)
        end = pull.plan.run.first_block + pull.plan.run.blocks
        if reason := self._problem(work, pull):
            return _refused(reason)
        while (arriving := self._arriving.get(pull.plan.run.tail)) is not None:
            await asyncio.shield(arriving)
        first = self._served.scheduler.cached_blocks(work)
        if first >= end:
            return TransferReport(TransferOutcome.HELD)
        if first < pull.plan.run.first_block:
            return _refused(Reason.STALE)
        return await self._fetch(work, pull, first, end)

    def _problem(self, work: Work, pull: Pull) -> Reason | None:
        plan, capability = pull.plan, pull.capability
        salt = self._keyring.read_salt(work.generation.cache_salt)
        if salt is None or salt.key_id != capability.key_id:
            return Reason.OTHER_TENANT
        end = plan.run.first_block + plan.run.blocks
        if end > len(work.names) or work.names[end - 1] != plan.run.tail or plan.is_shifted:
            return Reason.UNEXPECTED
        accepted = min(capability.fidelity, work.generation.fidelity)
        if plan.codec not in CODECS or _delivered(Fidelity.EXACT, plan.codec) > accepted:
            return Reason.UNEXPECTED
        return None

    async def _fetch(self, work: Work, pull: Pull, first: int, end: int) -> TransferReport:
        loop = asyncio.get_running_loop()
        arrival = self._arriving[pull.plan.run.tail] = loop.create_future()
        began = loop.time()
        self.metrics.loading += 1
        try:
            outcome = await fetch(pull, self._keyring, self._link)
            if isinstance(outcome, Delivered):
                return self._take_in(work, pull, (first, end), outcome, loop.time() - began)
        finally:
            self.metrics.loading -= 1
            del self._arriving[pull.plan.run.tail]
            arrival.set_result(None)
        if isinstance(outcome, Refused):
            return _refused(outcome.reason)
        return TransferReport(TransferOutcome.FAILED, outcome.reason.value, seconds=loop.time() - began)

    def _take_in(
        self, work: Work, pull: Pull, blocks: tuple[int, int], delivered: Delivered, seconds: float
    ) -> TransferReport:
        first, end = blocks
        fidelity = _delivered(delivered.fidelity, pull.plan.codec)
        if fidelity > work.generation.fidelity:
            return TransferReport(TransferOutcome.FAILED, Reason.UNEXPECTED.value, seconds=seconds)
        if not self._served.scheduler.take_in(work, end, fidelity):
            return TransferReport(TransferOutcome.FAILED, Reason.UNUSABLE.value, seconds=seconds)
        self.metrics.pull_seconds += seconds
        tokens = (end - first) * self._served.info.block_size_tokens
        return TransferReport(TransferOutcome.FETCHED, "", tokens, delivered.size_bytes, seconds, 1)


def plans_of(parameters: Mapping[str, Any] | None) -> Sequence[object]:
    plans = (parameters or {}).get(PARAMETER)
    return plans if isinstance(plans, list) else []


def _delivered(held: Fidelity, codec: str) -> Fidelity:
    return held if codec == _RAW else max(held, Fidelity.QUANTIZED)


def _refused(reason: Reason) -> TransferReport:
    return TransferReport(TransferOutcome.REFUSED, reason.value)


def _joined(total: TransferReport, report: TransferReport) -> TransferReport:
    """Of several plans: what the worst of them came to, and what they brought together."""
    nothing_new = report.outcome is TransferOutcome.HELD
    return TransferReport(
        total.outcome if nothing_new else report.outcome,
        report.reason,
        total.tokens + report.tokens,
        total.payload_bytes + report.payload_bytes,
        total.seconds + report.seconds,
        max(total.sources, report.sources),
    )
