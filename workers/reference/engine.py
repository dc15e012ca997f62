"""The reference engine: `workers.engine.Engine` over an `EngineCore` that runs on a thread of its own.

The event loop hands commands to the thread through a deque; after each step the thread hands all outputs back with one
`call_soon_threadsafe`. KV events go out on the engine's thread, before the outputs of their step: whoever has seen an
answer's first token can know that the blocks of its prompt have been announced.

KV that moves has a thread of its own (`transfer.service`). It wakes the engine's thread when something has come.
"""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from cachecore.events import KvEvent
from cachecore.index.schema import holder_id
from cachecore.kv.calibration import Calibration
from cachecore.prompts.contract import Renderer
from cachecore.scope import DEFAULT_TENANT, Fidelity, IdentityScope, Keyring, Naming, Salt, SaltError
from cachecore.transfer.engines.contract import EngineUnavailable
from workers.engine import (
    EngineError,
    EngineInfo,
    EngineMetrics,
    Generation,
    StepOutput,
    TransferInfo,
    TransferMetrics,
)
from workers.kv_quality import QualityJournal
from workers.reference.compatibility import shape_of
from workers.reference.config import ModelConfig, ModelError
from workers.reference.core import EngineCore
from workers.reference.guard import Guard, GuardOptions
from workers.reference.kv_pool import KvPool, NamedRun
from workers.reference.model import LlamaModel
from workers.reference.scheduler import LiveSequence, Scheduler
from workers.reference.tiers.host import HostTier, PinnedMemory
from workers.reference.weights import Weights, load_weights
from workers.transfer.loader import Destination
from workers.transfer.loads import Load
from workers.transfer.pages import Pages
from workers.transfer.plans import PlanReader, documents_of
from workers.transfer.service import TransferOptions, TransferService

logger = logging.getLogger(__name__)

_NAMINGS_MAX = 1024
"""Salts whose scope is kept ready; deriving one again costs some microseconds."""

KvEventSink = Callable[[Sequence[KvEvent]], object]
"""Called on the engine's thread with the events of one step, in order."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to run a model. 0 and "" choose by what the machine has."""

    served_model_name: str
    device: str = ""
    """`cuda` when there is one, else `cpu`."""
    dtype: str = ""
    """`bfloat16` on CUDA, `float32` on CPU."""
    block_size_tokens: int = 16
    blocks: int = 0
    """KV blocks; 0 takes `kv_memory_mib`."""
    kv_memory_mib: int = 512
    max_model_len: int = 0
    batched_tokens_max: int = 512
    """Tokens per step: the upper bound of how long a decode step waits for someone else's prompt."""
    sequences_max: int = 64
    transfer: TransferOptions | None = None
    """How it moves KV; None for one that moves none."""
    guard: GuardOptions | None = None
    """How many answers from KV that is not exact are checked, and how; None checks none."""
    on_named: Callable[[NamedRun], object] = lambda run: None
    """Hears, on the engine's thread, of blocks that are computed and named."""
    host_kv_mib: int = 0
    """Host memory for what the KV memory gives up; 0 keeps nothing."""

    def torch_device(self) -> torch.device:
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def torch_dtype(self) -> torch.dtype:
        names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        name = self.dtype or ("bfloat16" if self.torch_device().type == "cuda" else "float32")
        if name not in names:
            raise ModelError(f"dtype {name!r} is not one of {', '.join(names)}")
        return names[name]


class ReferenceEngine:
    """See the module's opening, and `workers.engine.Engine` for the contract."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        renderer: Renderer,
        options: EngineOptions,
        keyring: Keyring,
        on_kv_events: KvEventSink = lambda events: None,
        root: str = "",
    ) -> None:
        """Raises ModelError when the KV memory does not hold one sequence of `max_model_len`."""
        size = options.block_size_tokens
        blocks = options.blocks or _blocks_in(options, config)
        max_model_len = min(options.max_model_len or config.max_positions, config.max_positions)
        if options.max_model_len and blocks * size < max_model_len:
            raise ModelError(f"{blocks} blocks of {size} tokens do not hold max_model_len={max_model_len}")
        max_model_len = min(max_model_len, blocks * size)
        self.renderer = renderer
        self._metrics = EngineMetrics()
        self.info = EngineInfo(
            model=options.served_model_name,
            epoch=time.time_ns(),
            block_size_tokens=size,
            blocks_total=blocks,
            max_model_len=max_model_len,
            dtype=str(options.torch_dtype()).removeprefix("torch."),
            root=root or options.served_model_name,
            sequences_max=options.sequences_max,
        )
        self._config = config
        self._keyring = keyring
        scheduler = Scheduler(
            KvPool(blocks, size, options.on_named),
            options.batched_tokens_max,
            options.sequences_max,
            begin=self._begin_load,
            salt_of=self._salt_of,
        )
        self._core = EngineCore(
            LlamaModel(config, weights, max_model_len),
            scheduler,
            self._metrics,
            config.eos_token_ids,
            self._nudge,
            0 if options.transfer is None else options.transfer.ahead_steps,
        )
        if options.host_kv_mib:
            self._keep_below(options.host_kv_mib)
        self.quality: QualityJournal | None = None
        """What became of answers that were checked; None where none is."""
        if options.guard is not None:
            self.quality = QualityJournal()
            self._core.guard = Guard(self._core.model, self.quality, options.guard)
            self._core.chores.append(self._core.guard)
        self._transfer = None if options.transfer is None else self._transfer_service(options.transfer)
        self._plans: PlanReader | None = None
        self._on_kv_events = on_kv_events
        self._naming = lru_cache(_NAMINGS_MAX)(self._derive_naming)
        self._outputs: dict[str, asyncio.Queue[StepOutput | EngineError]] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._nudged = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def load(
        cls,
        directory: Path,
        renderer: Renderer,
        options: EngineOptions,
        keyring: Keyring,
        on_kv_events: KvEventSink = lambda events: None,
    ) -> "ReferenceEngine":
        """An engine for a Hugging Face directory. Raises ModelError."""
        config = ModelConfig.load(directory)
        weights = load_weights(directory, config, options.torch_dtype(), options.torch_device())
        return cls(config, weights, renderer, options, keyring, on_kv_events, str(directory))

    @property
    def metrics(self) -> EngineMetrics:
        if self._transfer is not None and self._metrics.transfer is not None:
            counts, transfer = self._transfer.counts, self._metrics.transfer
            transfer.served, transfer.served_bytes = counts.transfers, counts.payload_bytes
            transfer.refused = Counter({reason.value: count for reason, count in counts.refusals.items()})
        return self._metrics

    def listen(self) -> None:
        """Serve KV from now on, and say in `info` where; `start` does it otherwise. Raises ModelError."""
        if self._transfer is not None and self.info.transfer is None:
            self._start_transfer(self._transfer)

    async def start(self) -> None:
        """Raises ModelError as `listen` does."""
        self._loop = asyncio.get_running_loop()
        self._stopping = False
        await asyncio.to_thread(self.listen)
        self._thread = threading.Thread(target=self._run, name="reference-engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the loop; live generations end with finish reason `abort`."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(thread.join)
        self._core.abort_all()
        if self._transfer is not None:
            await asyncio.to_thread(self._transfer.stop)
        for queue in self._outputs.values():
            queue.put_nowait(StepOutput(finish_reason="abort"))

    async def generate(self, generation: Generation) -> AsyncIterator[StepOutput]:
        """Run one generation. Closing the iterator aborts it within one step. Raises EngineError before any output."""
        self._check(generation)
        sequence = LiveSequence(generation, self._naming(generation.cache_salt), arrival=0)
        if self._plans is not None and documents_of(generation):
            await asyncio.to_thread(self._plans.read, sequence)  # names the prompt's blocks
            self._check(generation)
        request_id = generation.request_id
        queue = self._outputs[request_id] = asyncio.Queue()  # at most a token each: the context bounds it
        self._command(lambda: self._core.add(sequence))
        finished = False
        try:
            while not finished:
                output = await queue.get()
                finished = isinstance(output, EngineError) or output.finish_reason is not None
                if isinstance(output, EngineError):
                    raise output
                yield output
        finally:
            del self._outputs[request_id]
            if not finished:
                self._command(lambda: self._core.abort(request_id))

    def stop_token_ids(self) -> Sequence[int]:
        return self._config.eos_token_ids

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; generations under way go on."""
        if self._thread is None:
            raise EngineError("the engine is not running", 503)
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def clear() -> None:
            self._core.clear()
            loop.call_soon_threadsafe(done.set)

        self._command(clear)
        await done.wait()

    async def cached_blocks(self) -> Mapping[int, int]:
        if self._thread is None:
            raise EngineError("the engine is not running", 503)
        loop = asyncio.get_running_loop()
        listed: asyncio.Future[Mapping[int, int]] = loop.create_future()

        def look() -> None:
            self._publish()
            handles = dict.fromkeys(self._core.handles(), 1)
            loop.call_soon_threadsafe(listed.set_result, handles)

        self._command(look)
        return await listed

    def _check(self, generation: Generation) -> None:
        count, limit = len(generation.token_ids), self.info.max_model_len
        if self._thread is None:
            raise EngineError("the engine is not running", 503)
        if generation.request_id in self._outputs:
            raise EngineError(f"request id {generation.request_id!r} is in use")
        if generation.adapter:
            raise EngineError(f"the adapter {generation.adapter!r} does not exist", 404)
        if not count:
            raise EngineError("the prompt is empty")
        if count + max(generation.sampling.max_tokens, 1) > limit:
            raise EngineError(
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{generation.sampling.max_tokens} output tokens and your prompt contains {count} input tokens."
            )
        if not 0 <= min(generation.token_ids) <= max(generation.token_ids) < self._config.vocab_size:
            raise EngineError(f"a token id of the prompt lies outside 0..{self._config.vocab_size - 1}")

    def _derive_naming(self, cache_salt: str) -> Naming:
        """The scope that a `cache_salt` stands for. Raises EngineError for a forged one."""
        try:
            salt = self._keyring.read_salt(cache_salt)
        except SaltError as error:
            raise EngineError(str(error)) from error
        if salt is None:
            key_id = self._keyring.key_id(DEFAULT_TENANT)
            salt = Salt(key_id, client_salt=self._keyring.client_salt_digest(key_id, cache_salt))
        scope = IdentityScope(
            model=self.info.model,
            key_id=salt.key_id,
            block_size_tokens=self.info.block_size_tokens,
            tokenizer=self.renderer.fingerprint,
            client_salt=salt.client_salt,
        )
        return Naming.of(scope, self._keyring)

    def _salt_of(self, sequence: LiveSequence, fidelity: Fidelity) -> str:
        """What blocks are announced with: what the prompt came with, as long as they are exact."""
        if fidelity is Fidelity.EXACT:
            return sequence.generation.cache_salt
        scope = sequence.naming.scope
        return self._keyring.mint_salt(Salt(scope.key_id, fidelity, scope.client_salt))

    def _keep_below(self, memory_mib: int) -> None:
        """Raises ModelError."""
        kv, pool = self._core.kv, self._core.pool
        try:
            tier = HostTier(PinnedMemory(kv.keys, kv.values, memory_mib * 2**20), pool.block_size_tokens)
        except ValueError as error:
            raise ModelError(str(error)) from error
        pool.below, self._metrics.host = tier, tier.metrics

    # ---- transfers ---------------------------------------------------------------------------------------------------

    def _transfer_service(self, options: TransferOptions) -> TransferService:
        core, info = self._core, self.info
        shape = shape_of(self._config, core.model.weights, info.block_size_tokens, info.max_model_len)
        destination = Destination(shape, Pages(core.kv.keys, core.kv.values), core.model.rope)
        return TransferService(options, self._keyring, info.epoch, destination, core, self._nudge)

    def _start_transfer(self, transfer: TransferService) -> None:
        try:
            transfer.start()
        except (OSError, EngineUnavailable) as error:
            raise ModelError(f"cannot serve KV on {transfer.options.host}: {error}") from error
        metrics = self._metrics.transfer = TransferMetrics()
        codecs = transfer.options.codecs
        self._core.scheduler.own_holder = transfer.holder
        self._plans = PlanReader(self._keyring, transfer.holder, codecs, metrics)
        self.info = replace(
            self.info,
            transfer=TransferInfo(
                holder=holder_id(transfer.holder).decode(),
                addresses=transfer.addresses,
                compatibility=transfer.destination.shape.compatibility.hex(),
                codecs=tuple(codecs),
                bytes_per_token=self._config.kv_elements_per_token * self._core.model.dtype.itemsize,
                shifted=True,
            ),
        )

    def calibrate(self, directory: Path) -> None:
        """Find out, when there is nothing else to do, which codecs are good enough for the model in `directory`, and
        let KV travel in those and no others. Before `start`."""
        from workers.reference.quality_gate import Calibrating, calibrating  # which measures with an engine's options

        if self._transfer is not None:
            shape = self._transfer.destination.shape
            pieces = calibrating(directory, self._core.model, self.renderer, shape.compatibility)
            self._core.chores.append(Calibrating(pieces, self._allow))

    def _allow(self, calibration: Calibration) -> None:
        codecs = tuple(calibration.allowed)
        if self._transfer is None or self._plans is None or self.info.transfer is None:
            raise RuntimeError("this engine moves no KV")
        self._transfer.allow(codecs)
        self._plans.codecs = codecs
        self.info = replace(self.info, transfer=replace(self.info.transfer, codecs=codecs))
        logger.info("KV travels as %s: %s", ", ".join(codecs), dict(calibration.kl_by_codec))

    def _begin_load(self, load: Load) -> None:
        if self._transfer is None:
            raise RuntimeError("this engine moves no KV")
        self._transfer.begin(load)

    def _nudge(self) -> None:
        """Something has come that the engine's thread may be waiting for."""
        with self._wake:
            self._nudged = True
            self._wake.notify()

    # ---- the engine's thread -----------------------------------------------------------------------------------------

    def _command(self, command: Callable[[], None]) -> None:
        """Have the engine's thread run it before its next step."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        while self._take_commands():
            deliveries = self._step()
            self._publish()
            if deliveries and self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._deliver, deliveries)

    def _step(self) -> Sequence[tuple[str, StepOutput | EngineError]]:
        try:
            return self._core.step()
        except Exception as error:
            logger.exception("an engine step failed")
            # Nobody knows which blocks hold what they should: start anew.
            request_ids = self._core.abort_all()
            self._core.clear()
            failure = EngineError(f"the engine failed: {error!r}", 500)
            return [(request_id, failure) for request_id in request_ids]

    def _take_commands(self) -> bool:
        """Wait for something to do and run what the event loop has asked for. False when the engine stops."""
        with self._wake:
            self._wake.wait_for(self._has_cause)
            self._nudged = False
            while self._commands:
                self._commands.popleft()()
            return not self._stopping

    def _has_cause(self) -> bool:
        waits = (self._core.idle or not self._core.has_work) and not self._core.has_chores
        return bool(self._commands) or self._nudged or self._stopping or not waits

    def _publish(self) -> None:
        events = self._core.take_events()
        if events:
            try:
                self._on_kv_events(events)
            except Exception:
                logger.exception("KV events could not be published")

    def _deliver(self, deliveries: Sequence[tuple[str, StepOutput | EngineError]]) -> None:
        for request_id, output in deliveries:
            queue = self._outputs.get(request_id)
            if queue is not None:
                queue.put_nowait(output)


def _blocks_in(options: EngineOptions, config: ModelConfig) -> int:
    """How many blocks the KV memory holds."""
    block_bytes = config.kv_elements_per_token * options.block_size_tokens * options.torch_dtype().itemsize
    return max(1, options.kv_memory_mib * 2**20 // block_bytes)
