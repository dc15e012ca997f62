"""The fleet: which workers there are, what they serve, whether they are well, which life they are in.

Each worker has one task that probes it. A worker is eligible from its first good probe on and until
`probes.unhealthy_after` probes in a row have failed, or until a request could not connect to it. Whether it does its
work, too, is for `gateway.reliability.safeguards` to judge. A new life (the process says another epoch, or it comes
back after having been away without a word for it) voids all that was known of the old one before any request can be
decided on it.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx
import msgspec

from cachecore.holders import Epoch
from cachecore.index.epochs import Epochs, OwnEpochs
from cachecore.prompts.contract import Renderer
from cachecore.prompts.plain import PlainRenderer
from gateway.config import ProbesConfig, WorkerConfig
from gateway.errors import BadRequest, ModelNotFound, NotFound, NoWorker
from gateway.fleet import parity
from gateway.fleet.engines.contract import Discovery, EngineAdapter, ModelEntry
from gateway.fleet.engines.discovery import Found, discover
from gateway.fleet.engines.questions import Leaving, ProbeError, Questions
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.scrutiny import Sample, SampleBudget, Scrutiny
from gateway.fleet.streams import EventStreams
from gateway.fleet.trust import Trust
from gateway.fleet.worker import ModelPool, Parity, WorkerRecord
from gateway.reliability.failures import Blame, Failure
from gateway.reliability.safeguards import Safeguards

logger = logging.getLogger("ropeway.fleet")

WORKERS_MAX = 1024
RANKS_MAX = 64

_LOAD_INTERVALS = 3
"""Probe intervals for which a report of an engine's queue is believed."""


class Fleet:
    """The workers of one gateway. `start` and `stop` own all its tasks."""

    def __init__(
        self,
        probes: ProbesConfig,
        renderers: Mapping[str, Renderer],
        knowledge: Knowledge,
        streams: EventStreams,
        epochs: Epochs | None = None,
        tls: ssl.SSLContext | None = None,
        safeguards: Safeguards | None = None,
    ) -> None:
        """`tls`: towards workers whose URLs begin with https; None trusts whom the system trusts."""
        self.tls = tls
        self.divided = False
        """Whether it serves tenants who must not learn of each other."""
        self._probes = probes
        self._renderers = renderers
        self._knowledge = knowledge
        self._streams = streams
        self._epochs = epochs or OwnEpochs()
        self.safeguards = safeguards or Safeguards()
        # Each worker is asked a few things at a time: none waits for a connection because others do not answer.
        # A process that has let go of its port and cannot end answers on whatever connection is open. So one is kept
        # for the questions of one probe, and the next asks whoever has the port then. Health and load are asked for
        # once in each interval: somewhere between lies a pause of half of it.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=probes.interval_seconds / 4)
        timeout = httpx.Timeout(probes.timeout_seconds, pool=None)
        self._http = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False, verify=tls or True)
        self._tasks: dict[WorkerRecord, asyncio.Task[None]] = {}
        self._scrutinies: dict[WorkerRecord, Scrutiny] = {}
        self._budget = SampleBudget()
        self._membership = asyncio.Lock()
        """Held while workers are added or removed."""
        self.workers: dict[str, WorkerRecord] = {}
        self.pools: dict[str, ModelPool] = {}
        self._adapters: dict[str, str] = {}
        """Adapter to base model."""
        self._turn = 0
        """Whose turn it is to tokenize for others."""

    @property
    def http(self) -> httpx.AsyncClient:
        """For questions to workers off the hot path."""
        return self._http

    async def stop(self) -> None:
        async with self._membership:
            for record in list(self.workers.values()):
                await self._detach(record)
        await self._http.aclose()
        await self._streams.stop()

    # Membership

    async def register(self, config: WorkerConfig) -> WorkerRecord:
        """Add a worker and begin to probe it. One of the same name or URL is replaced."""
        record = WorkerRecord.of(config, self.tls)
        if len(self.workers) >= WORKERS_MAX:
            raise NoWorker(f"the fleet has {WORKERS_MAX} workers already")
        async with self._membership:
            for other in [w for w in self.workers.values() if w.name == record.name or w.url == record.url]:
                await self._detach(other)
            self.workers[record.name] = record
            self.safeguards.joined(record)
            self._scrutinies[record] = Scrutiny(record, self._http, self._budget, self.divided)
            self._tasks[record] = asyncio.create_task(self._follow(record), name=f"probe {record.name}")
        return record

    async def remove(self, name: str) -> None:
        """Forget a worker. Requests that it is serving go on."""
        async with self._membership:
            record = self.workers.get(name)
            if record is None:
                raise NotFound(f"there is no worker {name!r}")
            await self._detach(record)

    async def drain(self, name: str, draining: bool) -> bool:
        """Send a worker no new requests, or do so again; what it is serving goes on. Whether other gateways are told.
        Raises NotFound."""
        record = self.workers.get(name)
        if record is None:
            raise NotFound(f"there is no worker {name!r}")
        record.config = msgspec.structs.replace(record.config, draining=draining)
        record.draining = draining
        return False

    async def probed(self, seconds_max: float) -> None:
        """Until every worker has been asked once whether it is well, but no longer than this."""
        waits = [asyncio.create_task(record.probed.wait()) for record in self.workers.values()]
        if waits:
            _, pending = await asyncio.wait(waits, timeout=seconds_max)
            for wait in pending:
                wait.cancel()

    async def _detach(self, record: WorkerRecord) -> None:
        """Forget a worker, once nothing is under way any more that could bring it back: its probes, then its events."""
        record.draining = True
        task = self._tasks.pop(record)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        del self._scrutinies[record]
        await self._streams.leave(record)
        record.healthy = False
        record.reason = "removed"
        del self.workers[record.name]
        self.safeguards.left(record)
        for pool in self.pools.values():
            if record in pool.workers:
                pool.workers.remove(record)
        for holder in record.holders:
            self._knowledge.remove(holder)
        record.connections.close_idle()
        self._rebuild_models()

    # Look-up

    def pool(self, model: str) -> tuple[ModelPool, str]:
        """The pool that serves a model id, and the adapter it names ("" for a base model). Raises ModelNotFound."""
        pool = self.pools.get(model)
        if pool is not None:
            return pool, ""
        base = self._adapters.get(model)
        if base is None:
            if not self.pools and self.workers:
                raise NoWorker("no worker is ready yet")
            raise ModelNotFound(model) if self.workers else NoWorker("no worker is registered")
        return self.pools[base], model

    def only_model(self) -> str:
        """The one base model served, for requests that name none. Raises BadRequest when there are several."""
        if len(self.pools) > 1:
            raise BadRequest("several models are served here: say which with 'model'", param="model")
        if not self.pools:
            raise NoWorker("no worker is ready")
        return next(iter(self.pools))

    def candidates(
        self, pool: ModelPool, adapter: str = "", excluded: Iterable[WorkerRecord] = ()
    ) -> list[WorkerRecord]:
        """The workers that may serve a request now. Raises NoWorker when there is none."""
        # `WorkerRecord.eligible`, without a call for each worker of each request.
        workers = [w for w in pool.workers if w.healthy and not w.draining]
        if pool.prefill_workers:
            workers = [w for w in workers if w not in pool.prefill_workers]
        if adapter:
            workers = [w for w in workers if adapter in w.models]
        if excluded:
            workers = [w for w in workers if w not in excluded]
        if self.safeguards.impaired:
            workers = self.safeguards.admitted(workers)
        if not workers:
            raise NoWorker(f"no healthy worker serves {adapter or pool.model!r} now")
        return workers

    def prefill_candidates(self, pool: ModelPool, adapter: str = "") -> list[WorkerRecord]:
        """The workers that may compute prompts for others now."""
        workers = [w for w in pool.prefill_workers if w.eligible and (not adapter or adapter in w.models)]
        return self.safeguards.admitted(workers) if self.safeguards.impaired else workers

    def models(self) -> list[ModelEntry]:
        """The union of the workers' model entries: one an id, with every field that came, the first worker's where they
        differ, and the smallest context length."""
        union: dict[str, ModelEntry] = {}
        for record in self.workers.values():
            if not record.healthy:
                continue
            for name, entry in record.models.items():
                known = union.setdefault(name, ModelEntry(entry))
                # What one says of it and another does not is said all the same.
                known.update({key: value for key, value in entry.items() if key not in known})
                lengths = [e["max_model_len"] for e in (known, entry) if isinstance(e.get("max_model_len"), int)]
                if lengths:
                    known["max_model_len"] = min(lengths)
        return list(union.values())

    def failed(self, record: WorkerRecord, request_id: str, failure: Failure) -> None:
        """An attempt at a worker has failed. Where that says that it is gone, no probe need say so."""
        self.safeguards.failed(record, request_id, failure)
        if failure.blame is Blame.SUSPECT and record.healthy:
            self._mark_unhealthy(record, failure.when)

    async def tokenize(self, pool: ModelPool, request: Mapping[str, Any]) -> Sequence[int] | None:
        """Token ids by a worker of the pool; None when none answers."""
        able = [worker for worker in pool.workers if worker.eligible and worker.tokenizes]
        able = [worker for worker in able if worker.parity is not Parity.FAILED] or able
        self._turn += 1
        for offset in range(len(able)):
            record = able[(self._turn + offset) % len(able)]
            if record.eligible:
                try:
                    return await record.adapter.tokenize(self._ask(record), request)
                except ProbeError as error:
                    logger.info("worker %s: %s", record.name, error)
        return None

    def _ask(self, record: WorkerRecord) -> Questions:
        return Questions(self._http, record.url)

    def sample(
        self, record: WorkerRecord, pool: ModelPool, question: Mapping[str, Any], told: Sequence[int] | None = None
    ) -> None:
        """A prompt that a worker has answered, to compare token for token if it is time for that. `told`: what another
        has told of it, where it cannot be tokenized here."""
        scrutiny = self._scrutinies.get(record)
        if scrutiny is None or not record.tokenizes:
            record.answers_until_sampled = parity.SAMPLED_EVERY
        else:
            scrutiny.sample(Sample(pool, question, told))

    # Probing

    async def _follow(self, record: WorkerRecord) -> None:
        # Loops of their own: a worker whose metrics hang is not asked less often whether it is well.
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(record))
            tasks.create_task(self._watch_load(record))
            tasks.create_task(self._scrutinies[record].run())

    async def _watch_load(self, record: WorkerRecord) -> None:
        """Ask the engine for its queue as often as for its health, for as long as it answers that."""
        interval, silent_epoch = self._probes.interval_seconds, None
        while True:
            await asyncio.sleep(interval)
            if not record.healthy or record.epoch == silent_epoch:
                continue
            try:
                if not await self._read_load(record):
                    silent_epoch = record.epoch
            except ProbeError as error:
                logger.debug("worker %s: %s", record.name, error)
            except Exception:
                logger.exception("reading the load of worker %s failed", record.name)

    async def _read_load(self, record: WorkerRecord) -> bool:
        """False when the worker does not say."""
        holders = record.holders
        accounts = [self._knowledge.accounting.account(holder.name, holder.rank) for holder in holders]
        before = sum(account.inflight for account in accounts)
        record.load = await record.adapter.load(self._ask(record))
        if record.load is None:
            return False
        still_there = self.workers.get(record.name) is record and holders == record.holders
        # Of several ranks together nothing can be said about one.
        if still_there and len(holders) == 1:
            inflight_max = max(before, accounts[0].inflight)
            until = time.monotonic() + _LOAD_INTERVALS * self._probes.interval_seconds
            self._knowledge.report_load(holders[0], record.load, inflight_max, until)
        return True

    async def _watch(self, record: WorkerRecord) -> None:
        while True:
            try:
                await self._probe(record)
            except ProbeError as error:
                record.failed_probes += 1
                enough = record.failed_probes >= self._probes.unhealthy_after or isinstance(error, Leaving)
                if enough or not record.discovery:
                    self._mark_unhealthy(record, str(error))
            except Exception:
                logger.exception("probing worker %s failed", record.name)
                self._mark_unhealthy(record, "the probe itself failed; see the log")
            record.probed.set()
            # A worker that is coming up is asked more often: every request waits for it.
            delay = self._probes.interval_seconds
            await asyncio.sleep(delay if record.healthy else min(delay, 0.25))

    async def _probe(self, record: WorkerRecord) -> None:
        ask = self._ask(record)
        await record.adapter.health(ask)
        # One that was away may have come back as another engine.
        earlier = Found(record.adapter, record.discovery) if record.healthy and record.discovery else None
        adapter, discovery = await discover(ask, record.config, earlier)
        returned = record.discovery is not None and not record.healthy and not record.asleep
        if self._new_life(record, discovery, returned):
            await self._begin_life(record, adapter, discovery)
        else:
            await self._continue_life(record, discovery)
        self._rebuild_models()
        record.failed_probes = 0
        record.asleep = discovery.asleep
        if discovery.asleep and not record.traits.wakes_itself:
            self._mark_unhealthy(record, "asleep")
        elif not record.healthy:
            record.healthy = True
            record.reason = ""
            logger.info("worker %s (%s) is ready: %s", record.name, adapter.name, ", ".join(discovery.models))

    def _new_life(self, record: WorkerRecord, discovery: Discovery, returned: bool) -> bool:
        if record.discovery is None:
            return True
        if discovery.epoch is not None:
            return discovery.epoch != record.epoch
        # Without a word for it, having been away is all the evidence there is.
        return returned

    async def _continue_life(self, record: WorkerRecord, discovery: Discovery) -> None:
        """The same process as before, though perhaps not with the same cache."""
        earlier = record.discovery
        assert earlier is not None  # noqa: S101  a life has begun
        discovery = record.discovery = discovery.completed(earlier)
        reloaded = discovery.reloaded(earlier)
        if reloaded:
            await self._begin_again(record, f"something else is loaded as {reloaded}: {discovery.revisions[reloaded]}")
        elif discovery.asleep != record.asleep:
            await self._begin_again(record, "it has gone to sleep" if discovery.asleep else "it was asleep")
        elif record.block_size_tokens and not earlier.block_size_tokens and not record.config.block_size_tokens:
            pool = self._join_pool(record, discovery)
            if pool.refresh_block_size():
                await self._rename(pool)
        elif record.parity_open:
            await self._settle_parity(record, self._join_pool(record, discovery))

    async def _begin_again(self, record: WorkerRecord, reason: str) -> None:
        """Void what is known of the cache of a life that goes on: it was emptied, and events need not have said so."""
        logger.info("worker %s: %s; what it held is forgotten", record.name, reason)
        discovery = record.discovery
        assert discovery is not None  # noqa: S101
        emptied_at = time.time()  # what it announces from here on is true, though nobody may be listening yet
        for holder in record.holders:
            self._knowledge.forget(holder)
        await self._streams.leave(record)
        for holder in record.holders:
            self._knowledge.forget(holder)
        record.trust = Trust()
        if discovery.events is not None:
            discovery.events = discovery.events.since(emptied_at)
        pool = self._join_pool(record, discovery)
        await self._settle_parity(record, pool)
        await self._streams.follow(record, pool)

    async def _begin_life(self, record: WorkerRecord, adapter: EngineAdapter, discovery: Discovery) -> None:
        """Void what is known of the former life, then learn what this one is."""
        said = discovery.epoch
        epoch = Epoch(said) if said is not None else await self._epochs.after(record.name, record.epoch)
        if record.discovery is not None:
            logger.info("worker %s has restarted", record.name)
        for holder in record.holders:
            self._knowledge.forget(holder)
        await self._streams.leave(record)
        record.connections.close_idle()
        record.adapter, record.traits = adapter, adapter.traits
        record.discovery, record.lacks = discovery, ()
        record.epoch = epoch
        record.trust = Trust()
        self.safeguards.reborn(record)
        ranks = discovery.events.ranks if discovery.events else 1
        record.holders = tuple(record.holder(rank) for rank in range(min(ranks, RANKS_MAX)))
        for holder in record.holders:
            self._knowledge.declare_capacity(holder, discovery.capacity_requests, discovery.kv_tokens)
        record.load = None
        pool = self._join_pool(record, discovery)
        if pool.refresh_block_size():
            await self._rename(pool, record)
        await self._settle_parity(record, pool)
        await self._streams.follow(record, pool)
        self._scrutinies[record].life_begun()

    def _join_pool(self, record: WorkerRecord, discovery: Discovery) -> ModelPool:
        model = record.config.model or next(name for name, entry in discovery.models.items() if not entry.parent)
        for other in self.pools.values():
            if record in other.workers and other.model != model:
                other.workers.remove(record)
        pool = self.pools.get(model)
        if pool is None:
            pool = self.pools[model] = ModelPool(model)
        if record not in pool.workers:
            pool.workers.append(record)
            pool.refresh_roles()
        self._choose_renderer(pool, discovery)
        return pool

    def _choose_renderer(self, pool: ModelPool, discovery: Discovery) -> None:
        if pool.renderer is not None:
            return
        pool.renderer = self._renderers.get(pool.model)
        if pool.renderer is None and discovery.tokenizer_fingerprint == PlainRenderer.fingerprint:
            pool.renderer = PlainRenderer()

    async def _rename(self, pool: ModelPool, beginning: WorkerRecord | None = None) -> None:
        """The pool's block size has changed: every name made so far is void, and events must be read anew. Those of the
        worker whose life is beginning are read in a moment anyway."""
        for worker in pool.workers:
            await self._streams.leave(worker)
            for holder in worker.holders:
                self._knowledge.forget(holder)
            if worker is not beginning and worker.discovery is not None:
                await self._streams.follow(worker, pool)

    async def _settle_parity(self, record: WorkerRecord, pool: ModelPool) -> None:
        told = pool.probe_tokens
        if not any(w.eligible and w.parity is Parity.PROVEN for w in pool.workers if w is not record):
            # Nobody is left who would tell what another worker told.
            pool.probe_tokens = {}
        try:
            verdict = await parity.prove(record.adapter, self._ask(record), pool)
            record.parity_open = False
        except ProbeError as error:
            # Busy, perhaps: the next probe asks again.
            verdict = parity.Verdict(Parity.UNVERIFIED, str(error))
            record.parity_open = True
        if any(told.get(position, tokens) != tokens for position, tokens in pool.probe_tokens.items()):
            pool.generation += 1
        record.tokenizes = verdict.tokenizes
        parity.settle(record, verdict.parity, verdict.reason)

    def _mark_unhealthy(self, record: WorkerRecord, reason: str) -> None:
        if record.healthy:
            logger.warning("worker %s is unhealthy: %s", record.name, reason)
        record.healthy = False
        record.reason = reason
        record.connections.close_idle()

    def _rebuild_models(self) -> None:
        self._adapters = {}
        for name in [name for name, pool in self.pools.items() if not pool.workers]:
            del self.pools[name]
        for pool in self.pools.values():
            pool.adapters = {
                name for worker in pool.workers for name, entry in worker.models.items() if name != pool.model
            }
            self._adapters.update(dict.fromkeys(pool.adapters, pool.model))
            pool.transfers = any(worker.transfer is not None for worker in pool.workers)
            pool.refresh_roles()
