"""What vLLM loads, and the only module here that imports it.

    --kv-transfer-config '{"kv_connector": "RopewayConnector", "kv_connector_module_path": "workers.vllm.connector",
      "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"keyring": "..."}}'

vLLM makes two of them, in two processes: one for its scheduler, one for its worker. Nothing of a client's reaches vLLM
as an exception (`guarded`). KV is only loaded while a request waits for it, never within a step: a step waits for
nobody, and blocks are named once they are there.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.transformers_utils.repo_utils import hf_api
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from cachecore.index.schema import holder_id, parse_holder
from cachecore.scope import Keyring
from workers.guarded import guarded
from workers.vllm.facts import read_facts
from workers.vllm.orders import Orders, Settled
from workers.vllm.requests import Requests, Scheduled
from workers.vllm.settings import SettingsError
from workers.vllm.sides import WorkerSide, scheduler_side

logger = logging.getLogger("ropeway.transfer")


_PATIENCE_SECONDS = 0.05
"""That an engine with nothing to compute waits at each step for a load to end: it would ask again at once, and take the
interpreter from the threads that load."""


@dataclass
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """From the worker's side to the scheduler's, once."""

    holder: str


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    orders: Orders


class RopewayConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module's opening. Raises SettingsError when it is made for what it does not serve."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if len(kv_cache_config.kv_cache_groups) > 1:
            raise SettingsError("models with several kinds of KV cache are not supported by this connector")
        self._facts = read_facts(vllm_config, _snapshot)
        try:
            self._keyring = Keyring.load(Path(self._facts.settings.keyring))
        except ValueError as error:
            raise SettingsError(str(error)) from error
        self._worker = WorkerSide(self._facts, self._keyring) if role is KVConnectorRole.WORKER else None
        self._computes = False
        """Whether this step computes anything."""
        self._requests: Requests | None = None
        self._pool: Any = None
        self._prefixes: Any = None
        """The pool's own map of prefixes: it has another one when it was reset."""

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # ---- the worker's ------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        """Raises SettingsError: vLLM does not start."""
        assert self._worker is not None  # noqa: S101
        layer = self._vllm_config.compilation_config.static_forward_context[next(iter(kv_caches))]

        def store(keys: Tensor, values: Tensor, memory: Tensor, slots: Tensor) -> None:
            layer.impl.do_kv_cache_update(layer, keys, values, memory, slots)

        _log_as_vllm_does()
        self._worker.start(kv_caches, str(getattr(layer, "isa", None)), store)

    def get_handshake_metadata(self) -> Handshake | None:
        return None if self._worker is None else Handshake(holder_id(self._worker.holder).decode())

    @guarded(None)
    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        if self._worker is not None and self._worker.mover is not None:
            self._worker.mover.obey(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **_kwargs: Any) -> None:
        """Loads have been begun with the step's orders."""
        self._computes = forward_context.attn_metadata is not None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are over before the request computes."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **_kwargs: Any) -> None:
        """Blocks are served from where they lie."""

    def wait_for_save(self) -> None:
        pass

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        settled = self._settled()
        finished, failed = set(settled.request_ids), set(settled.failed_ids)
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    @guarded(Settled(set(), set()))
    def _settled(self) -> Settled:
        if self._worker is None or self._worker.mover is None:
            return Settled(set(), set())
        return self._worker.mover.settled(0.0 if self._computes else _PATIENCE_SECONDS)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.stop()

    # ---- the scheduler's ---------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        (handshake,) = metadata.values()
        assert isinstance(handshake, Handshake)  # noqa: S101
        _log_as_vllm_does()
        holder = parse_holder(handshake.holder.encode())
        self._requests = scheduler_side(self._facts, self._keyring, holder)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool
        self._prefixes = gpu_block_pool.cached_block_hash_to_block

    @guarded(None)
    def on_new_request(self, request: Any) -> None:
        if self._requests is not None and _is_all_tokens(request):
            self._requests.add(request)

    @guarded((0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._requests is None or request.skip_reading_prefix_cache:
            return 0, False
        tokens = self._requests.match(request.request_id, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._requests is None:
            return
        (numbers,) = blocks.get_block_ids()
        try:
            self._requests.allocated(request.request_id, numbers, num_external_tokens)
        except Exception:
            logger.exception("a load could not be ordered; it will be computed")
            if num_external_tokens:
                self._requests.abandon(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        if self._requests is None:
            return StepMetadata(Orders())
        try:
            self._watch_pool()
            table = scheduler_output.kv_connector_block_state.resolve_block_ids
            return StepMetadata(self._requests.step(_scheduled(scheduler_output), lambda name: table(name)[0]))
        except Exception:
            logger.exception("a step could not be described; nothing that is known so far is served any more")
            self._requests.clear()
            return StepMetadata(self._requests.step((), lambda name: ()))

    @guarded(None)
    def update_connector_output(self, connector_output: Any) -> None:
        if self._requests is not None:
            failed = connector_output.failed_recving or ()
            self._requests.received(connector_output.finished_recving or (), failed)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded((False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Nothing is kept: what is served is served as long as vLLM itself still has it."""
        if self._requests is not None:
            self._requests.finish(request.request_id, block_ids[0])
        return False, None

    @guarded(False)
    def has_pending_push_work(self) -> bool:
        """An idle engine makes one step more for what the worker's side has to hear."""
        if self._requests is None:
            return False
        self._watch_pool()
        return self._requests.has_orders

    @guarded(False)
    def reset_cache(self) -> bool:
        if self._requests is not None:
            self._requests.clear()
        return True

    def _watch_pool(self) -> None:
        if self._requests is not None and self._pool.cached_block_hash_to_block is not self._prefixes:
            self._prefixes = self._pool.cached_block_hash_to_block
            self._requests.clear()


def _snapshot(model: str, revision: str | None) -> str:
    """vLLM has loaded it by now."""
    return str(hf_api().snapshot_download(repo_id=model, revision=revision, local_files_only=True))


def _log_as_vllm_does() -> None:
    """What is said here is seen where vLLM's own words are."""
    ours, theirs = logging.getLogger("ropeway"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), theirs.propagate
        ours.setLevel(theirs.level)


def _is_all_tokens(request: Any) -> bool:
    """Whether a request's KV depends on nothing but the model and its token ids."""
    given = request.mm_features, request.lora_request
    return request.prompt_token_ids is not None and request.prompt_embeds is None and not any(given)


def _scheduled(output: Any) -> Iterator[Scheduled]:
    for new in output.scheduled_new_reqs:
        yield Scheduled(new.req_id, new.block_ids[0], True, new.num_computed_tokens)
    cached = output.scheduled_cached_reqs
    for request_id, blocks, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        numbers = [] if blocks is None else blocks[0]
        yield Scheduled(request_id, numbers, request_id in cached.resumed_req_ids, computed)
