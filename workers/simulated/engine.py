"""An engine that computes nothing: caching, batching and time as a real one, without a model."""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from secrets import token_bytes

from cachecore.blocks import HASH_KEY_BYTES, BlockHasher
from cachecore.events import Dialect, EventBatch
from cachecore.prompts.contract import Renderer
from cachecore.scope import Keyring, SaltError
from workers.engine import EngineError, EngineInfo, EngineMetrics, Generation, StepOutput, TransferReport
from workers.simulated.cache import BlockCache
from workers.simulated.journal import handle_of, kv_events
from workers.simulated.link import LinkConfig
from workers.simulated.scheduler import Said, Scheduler, SchedulerLimits, Step, Work
from workers.simulated.transfer import Served, Transfers, plans_of
from workers.simulated.voice import logprob_of, voice_of
from workers.timing import DEFAULT_PROFILE, TimingProfile, profile_named

logger = logging.getLogger(__name__)

EventSink = Callable[[EventBatch], object]


@dataclass(frozen=True, slots=True)
class SimulatedConfig:
    """One simulated engine. Zeros take the timing profile's own figures."""

    model: str = "simulated"
    profile: TimingProfile = field(default_factory=lambda: profile_named(DEFAULT_PROFILE))
    speed: float = 1.0
    """How much faster than the profile it runs; `inf` does not wait at all."""
    dialect: Dialect = Dialect.VLLM_MAP
    block_size_tokens: int = 16
    blocks_total: int = 0
    max_model_len: int = 131_072
    batch_tokens_max: int = 0
    sequences_max: int = 0
    link: LinkConfig | None = None
    """Over which it moves KV; None moves none."""

    def __post_init__(self) -> None:
        if not self.speed > 0:
            raise ValueError(f"speed must be positive, not {self.speed}")
        if self.blocks < 1:
            raise ValueError(f"an engine needs at least one block of KV memory, not {self.blocks}")

    @property
    def blocks(self) -> int:
        return self.blocks_total or self.profile.kv_blocks(self.block_size_tokens)

    @property
    def limits(self) -> SchedulerLimits:
        return SchedulerLimits(
            batch_tokens_max=self.batch_tokens_max or self.profile.batch_tokens_max,
            sequences_max=self.sequences_max or self.profile.sequences_max,
            names_early=self.dialect is not Dialect.SGLANG,
        )

    def info(self) -> EngineInfo:
        """A fresh life of such an engine. What cannot fit into its memory is no context it could serve."""
        return EngineInfo(
            model=self.model,
            epoch=time.time_ns(),
            block_size_tokens=self.block_size_tokens,
            blocks_total=self.blocks,
            max_model_len=min(self.max_model_len, self.blocks * self.block_size_tokens),
            root=f"simulated:{self.profile.name}",
            sequences_max=self.limits.sequences_max,
        )


class SimulatedEngine:
    """Implements `workers.engine.Engine`. KV events of each step go to `sink`, which must not block."""

    def __init__(
        self,
        config: SimulatedConfig,
        renderer: Renderer,
        sink: EventSink | None = None,
        keyring: Keyring | None = None,
    ) -> None:
        """With a keyring, salts that claim to be Ropeway's and do not authenticate are refused. Without one no KV is
        moved: whom a block belongs to and what it is called is derived from it."""
        self.config = config
        self.renderer = renderer
        self.info = config.info()
        self._counted = EngineMetrics()
        self._sink = sink
        self._keyring = keyring
        # Real engines' hashes differ from life to life too: nobody may rely on them.
        hasher = BlockHasher(token_bytes(HASH_KEY_BYTES), config.block_size_tokens)
        self._scheduler = Scheduler(BlockCache(config.blocks), hasher, config.limits)
        self._voice = voice_of(renderer)
        self._queues: dict[Work, asyncio.Queue[StepOutput]] = {}
        self._wake = asyncio.Event()
        self._resets: list[asyncio.Future[None]] = []
        self._loop_task: asyncio.Task[None] | None = None
        self._reports: dict[Work, TransferReport] = {}
        self.transfers: Transfers | None = None
        if config.link is not None:
            if keyring is None:
                raise ValueError("a worker that moves KV needs a keyring")
            served = Served(self.info, config.profile, config.speed, renderer, self._scheduler)
            self.transfers = Transfers(config.link, keyring, served)
            self._counted.transfer = self.transfers.metrics

    @property
    def metrics(self) -> EngineMetrics:
        scheduler, counted = self._scheduler, self._counted
        counted.requests_running = len(scheduler.running)
        counted.requests_waiting = scheduler.waiting_count
        counted.kv_cache_usage = scheduler.cache.used / scheduler.cache.blocks_total
        counted.prefix_cache_queries = scheduler.counters.lookup_tokens
        counted.prefix_cache_hits = scheduler.counters.hit_tokens
        counted.preemptions = scheduler.counters.preemptions
        return counted

    async def start(self) -> None:
        if self._loop_task is None:
            if self.transfers is not None:
                self.info = replace(self.info, transfer=await self.transfers.start())
            if self.config.dialect is Dialect.SGLANG:
                self._scheduler.reset()  # SGLang's first event says that the cache is empty
                self._publish()
            self._loop_task = asyncio.create_task(self._run_guarded(), name="simulated-engine")

    async def stop(self) -> None:
        task, self._loop_task = self._loop_task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._abort_all()
        if self.transfers is not None:
            await self.transfers.stop()

    async def generate(self, generation: Generation) -> AsyncIterator[StepOutput]:
        self._check(generation)
        lineage = self.transfers.lineage(generation) if self.transfers is not None else None
        loading = lineage is not None and bool(plans_of(generation.kv_transfer_params))
        work = self._scheduler.add(generation, self._voice(generation), lineage, loading=loading)
        queue = self._queues[work] = asyncio.Queue()  # at most a token each: the context bounds it
        self._counted.prompt_tokens += work.prompt_tokens
        self._wake.set()
        try:
            if loading:
                await self._load(work)
            while True:
                output = await queue.get()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._queues.pop(work, None)
            self._reports.pop(work, None)
            if self._scheduler.abort(work):
                self._count_finish("abort")

    async def _load(self, work: Work) -> None:
        assert self.transfers is not None  # noqa: S101
        self._reports[work] = await self.transfers.load(work)
        self._publish()
        self._scheduler.loaded(work)
        self._wake.set()

    def stop_token_ids(self) -> Sequence[int]:
        return ()

    async def reset_prefix_cache(self) -> None:
        """Takes effect between two steps."""
        done = asyncio.get_running_loop().create_future()
        self._resets.append(done)
        if self._loop_task is None:
            self._reset_if_wanted()
        self._wake.set()
        await done

    async def cached_blocks(self) -> Mapping[int, int]:
        self._publish()  # evictions of the step under way
        return self.cached_handles()

    def cached_handles(self) -> Counter[int]:
        """Copies of every hittable block by the handle that its KV events carry."""
        return Counter({handle_of(name): copies for name, copies in self._scheduler.cache.contents().items()})

    def _check(self, generation: Generation) -> None:
        if self._loop_task is None:
            raise EngineError("the engine is not running", 503)
        if len(generation.token_ids) >= self.info.max_model_len:
            raise EngineError(f"the prompt exceeds the context of {self.info.max_model_len} tokens")
        if self._keyring is not None:
            try:
                self._keyring.read_salt(generation.cache_salt)
            except SaltError as error:
                raise EngineError(str(error)) from error

    async def _run_guarded(self) -> None:
        """A loop that fails takes no one with it: who waits is told, who comes is refused."""
        try:
            await self._run()
        except Exception:
            logger.exception("the simulated engine has failed")
            self._loop_task = None
            self._abort_all()

    def _abort_all(self) -> None:
        for work in list(self._queues):
            self._scheduler.abort(work)
            self._deliver(work, StepOutput(finish_reason="abort", cached_tokens=work.cached_tokens or 0))

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        ready_at = clock()
        while True:
            self._reset_if_wanted()
            step = self._scheduler.schedule()
            if not step.shares:
                self._publish()
                self._wake.clear()
                if not self._scheduler.busy and not self._resets:
                    await self._wake.wait()
                ready_at = clock()
                continue
            ready_at = await self._pace(ready_at, step)
            said = self._scheduler.complete(step)
            # Before any token: whoever sees the answer may already look for the blocks.
            self._publish()
            for item in said:
                self._say(item)

    async def _pace(self, ready_at: float, step: Step) -> float:
        """Wait until the step would be done. Timers are coarse, so what one step oversleeps the next one gets back."""
        seconds = self.config.profile.step_seconds(step.chunks, step.decode_load) / self.config.speed
        now = asyncio.get_running_loop().time()
        done_at = max(ready_at, now - _CATCH_UP_SECONDS) + seconds
        await asyncio.sleep(max(done_at - now, 0.0) if math.isfinite(done_at) else 0.0)
        return done_at

    def _reset_if_wanted(self) -> None:
        if self._resets:
            self._scheduler.reset()
            self._publish()
            for done in self._resets:
                if not done.done():
                    done.set_result(None)
            self._resets.clear()

    def _publish(self) -> None:
        journal = self._scheduler.cache.take_journal()
        if journal and self._sink is not None:
            events = kv_events(journal, self.config.dialect, self.config.block_size_tokens)
            self._sink(EventBatch(time.time(), events, rank=0))

    def _say(self, said: Said) -> None:
        work, sampling = said.work, said.work.generation.sampling
        output = StepOutput((said.token_id,), finish_reason=said.finish_reason, cached_tokens=work.cached_tokens or 0)
        output.fidelity, output.transfer = work.fidelity, self._reports.pop(work, None)
        if sampling.logprobs is not None:
            output.logprobs = (logprob_of(said.token_id, sampling.logprobs),)
        if sampling.prompt_logprobs is not None and work.outputs == 1:
            scored = [logprob_of(token_id, sampling.prompt_logprobs) for token_id in work.generation.token_ids[1:]]
            output.prompt_logprobs = [None, *scored]
        self._counted.generation_tokens += 1
        if said.finish_reason is not None:
            self._count_finish(said.finish_reason)
        self._deliver(work, output)

    def _deliver(self, work: Work, output: StepOutput) -> None:
        queue = self._queues.get(work)
        if queue is not None:
            queue.put_nowait(output)

    def _count_finish(self, reason: str) -> None:
        self._counted.requests_finished[reason] = self._counted.requests_finished.get(reason, 0) + 1


_CATCH_UP_SECONDS = 0.05
"""How far a step may start in the past, to make good for timers that woke late."""
