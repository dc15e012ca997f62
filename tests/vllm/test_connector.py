"""The connector against vLLM's own code, without an instance: what it uses is there, and KV lies where it looks."""

import dataclasses
import importlib
import inspect
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cachecore.index.schema import holder_id
from cachecore.kv.layout import LayerKv
from cachecore.prompts.huggingface import HuggingFaceRenderer
from tests.gateway.end_to_end.processes import new_keyring
from tests.workers.vllm.support import OURS, FakeRequest, planned, scheduler
from workers.reference.compatibility import compatibility_of
from workers.reference.config import ModelConfig
from workers.reference.fetch import default_cache_dir, fetch_smollm2
from workers.reference.weights import load_weights
from workers.vllm.classes import class_of
from workers.vllm.layout import engine_memory
from workers.vllm.orders import LoadOrder, Orders
from workers.vllm.settings import SettingsError

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
"""Warnings are of vLLM's own imports, which happen in here: the modules are not there without it."""

KV_HEADS, SIZE = 3, 32


@pytest.fixture(scope="module")
def connectors() -> ModuleType:
    return importlib.import_module("workers.vllm.connector")


def kernel_of(kernel: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """As `CPUAttentionBackendImpl.do_kv_cache_update` calls it."""
    from vllm import _custom_ops

    def store(keys: Tensor, values: Tensor, memory: Tensor, slots: Tensor) -> None:
        blocks, kv_heads, size, _ = memory.size()
        parts = memory.view((blocks, kv_heads, size * 2, -1)).chunk(2, dim=2)
        _custom_ops.cpu_attn_reshape_and_cache(keys, values, *parts, slots, kernel)

    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kernel", "head_dim"), [("vec", 64), ("vec", 128), ("vec16", 80)])
def test_vllms_kernels_put_tokens_where_they_are_looked_for(kernel: str, head_dim: int, dtype: torch.dtype) -> None:
    tensors = [torch.zeros(6, KV_HEADS, SIZE, 2 * head_dim, dtype=dtype) for _ in range(2)]
    memory = engine_memory(tensors, kernel, kernel_of(kernel))
    blocks = torch.tensor([4, 0, 5])
    kv = LayerKv(*(torch.randn(3 * SIZE, KV_HEADS, head_dim).to(dtype) for _ in range(2)))
    slots = (blocks[:, None] * SIZE + torch.arange(SIZE)).flatten()
    kernel_of(kernel)(*kv, tensors[1], slots)
    memory.write_blocks(0, blocks, kv)
    assert torch.equal(tensors[0], tensors[1])
    assert all(torch.equal(*pair) for pair in zip(memory.read_blocks(1, blocks), kv, strict=True))


def test_every_hook_is_one_that_vllm_calls(connectors: ModuleType) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    kind = connectors.RopewayConnector
    hooks = [name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")]
    for name in hooks:
        theirs = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name)
        ours = inspect.signature(inspect.unwrap(getattr(kind, name)))
        assert list(ours.parameters)[:2] == list(inspect.signature(theirs).parameters)[:2], name
        assert len(ours.parameters) == len(inspect.signature(theirs).parameters), name
    assert not kind.__abstractmethods__
    assert "kv_cache_config" in inspect.signature(kind).parameters


def test_what_is_read_of_vllms_objects_is_there() -> None:
    from vllm.config import CacheConfig, KVEventsConfig, KVTransferConfig, ModelConfig, ParallelConfig, SchedulerConfig
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, NewRequestData, SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

    for kind, names in {
        CacheConfig: "block_size cache_dtype enable_prefix_caching",
        KVEventsConfig: "enable_kv_cache_events publisher endpoint replay_endpoint topic",
        KVTransferConfig: "kv_connector_extra_config kv_load_failure_policy",
        ModelConfig: "model revision tokenizer served_model_name dtype max_model_len hf_config",
        ParallelConfig: "tensor_parallel_size pipeline_parallel_size data_parallel_index data_parallel_size",
        SchedulerConfig: "async_scheduling",
        NewRequestData: "req_id block_ids num_computed_tokens",
        CachedRequestData: "req_ids resumed_req_ids new_block_ids num_computed_tokens",
        KVConnectorBlockState: "resolve_block_ids",
        SchedulerOutput: "scheduled_new_reqs scheduled_cached_reqs kv_connector_block_state",
        KVConnectorOutput: "finished_recving failed_recving",
    }.items():
        missing = set(names.split()) - {field.name for field in dataclasses.fields(kind)}
        assert not missing, (kind, missing)
    assert "cached_block_hash_to_block" in inspect.getsource(BlockPool.reset_prefix_cache)
    assert callable(KVCacheBlocks.get_block_ids)
    assert callable(CPUAttentionBackendImpl.do_kv_cache_update)


def test_a_real_request_is_read_as_it_is() -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    given = planned()
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": given.kv_transfer_params})
    request = Request("one", given.all_token_ids, sampling, None, cache_salt=given.cache_salt)
    assert (request.mm_features, request.lora_request, request.prompt_embeds) == ([], None, None)
    requests = scheduler()
    requests.add(request)
    assert requests.match("one", 0) == 40
    assert not request.skip_reading_prefix_cache


def test_what_goes_between_the_processes_gets_there(connectors: ModuleType) -> None:
    """By the means of Python's own processes, as vLLM sends it."""
    requests = scheduler()
    requests.add(planned())
    tokens = requests.match("one", 0)
    assert tokens
    requests.allocated("one", range(11), tokens)
    orders = requests.step((), lambda name: ())
    handshake = connectors.Handshake("w/a/1/0")
    receiving, sending = multiprocessing.Pipe(duplex=False)
    with receiving, sending:
        sending.send(connectors.StepMetadata(orders))
        assert receiving.recv().orders == orders
        sending.send(handshake)
        assert receiving.recv() == handshake


def nothing_scheduled() -> SimpleNamespace:
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        ),
        kv_connector_block_state=SimpleNamespace(resolve_block_ids=lambda name: ([],)),
    )


class BrokenRequests:
    """Fails at whatever it is asked."""

    def __init__(self) -> None:
        self.abandoned: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def fail(*_: object) -> object:
            if name == "abandon":
                self.abandoned.append(str(_[0]))
                return None
            if name == "clear" or (name == "step" and _[0] == ()):
                return Orders(cleared=True, loads=[LoadOrder("one", None, 0, ())])  # type: ignore[arg-type]
            raise RuntimeError(name)

        return fail


def test_no_hook_of_the_schedulers_raises(connectors: ModuleType) -> None:
    """Whatever is wrong in here, vLLM goes on, and nobody waits for a load that was never ordered."""
    connector = connectors.RopewayConnector.__new__(connectors.RopewayConnector)
    broken = connector._requests = BrokenRequests()
    connector._pool = SimpleNamespace(cached_block_hash_to_block=None)
    connector._prefixes = None
    request = SimpleNamespace(
        **vars(FakeRequest()),
        mm_features=[],
        lora_request=None,
        prompt_embeds=None,
        prompt_token_ids=[1],
        skip_reading_prefix_cache=False,
    )
    blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],))
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    connector.update_state_after_alloc(request, blocks, 0)
    assert broken.abandoned == []
    connector.update_state_after_alloc(request, blocks, 64)
    assert broken.abandoned == ["one"]
    orders = connector.build_connector_meta(nothing_scheduled()).orders
    assert [load.request_id for load in orders.loads] == ["one"]
    connector.update_connector_output(SimpleNamespace(finished_recving={"one"}, failed_recving=None))
    assert connector.request_finished_all_groups(request, ([1, 2],)) == (False, None)


# ---- before it starts ------------------------------------------------------------------------------------------------


def configured(keyring: Path, policy: str = "recompute", **flags: Any) -> Any:
    """What vLLM makes of its flags."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    transfer = KVTransferConfig(
        kv_connector="RopewayConnector",
        kv_connector_module_path="workers.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy=policy,  # type: ignore[arg-type]
        kv_connector_extra_config={"keyring": str(keyring)},
    )
    options = {"dtype": "float32", "block_size": 32, "max_model_len": 2048, "enforce_eager": True, **flags}
    model = fetch_smollm2(default_cache_dir()).directory
    return EngineArgs(model=str(model), kv_transfer_config=transfer, **options).create_engine_config()


@pytest.fixture
def keyring(tmp_path: Path) -> Path:
    return new_keyring(tmp_path)


def made(connectors: ModuleType, config: Any, groups: int = 1) -> Any:
    """As vLLM makes it, for its scheduler."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    return connectors.RopewayConnector(config, KVConnectorRole.SCHEDULER, SimpleNamespace(kv_cache_groups=[0] * groups))


def test_vllms_own_configuration_is_read(connectors: ModuleType, keyring: Path) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    config = configured(keyring)
    assert KVConnectorFactory.get_connector_class(config.kv_transfer_config) is connectors.RopewayConnector
    facts = made(connectors, config)._facts
    assert (facts.block_size_tokens, facts.rank, facts.kv_events) == (32, 0, None)
    assert (facts.checkpoint.dtype, facts.checkpoint.positions) == (torch.float32, 2048)
    assert facts.tokenizer_fingerprint == HuggingFaceRenderer.load(facts.checkpoint.directory).fingerprint
    config_file = ModelConfig.load(facts.checkpoint.directory)
    weights = load_weights(facts.checkpoint.directory, config_file, torch.float32, torch.device("cpu"))
    assert class_of(facts.checkpoint).compatibility == compatibility_of(config_file, weights, 4096)


@pytest.mark.parametrize(
    ("flags", "groups", "reason"),
    [
        ({"policy": "fail"}, 1, "kv_load_failure_policy is 'fail'"),
        ({"enable_prefix_caching": False}, 1, "without --enable-prefix-caching"),
        ({}, 2, "several kinds of KV cache"),
    ],
)
def test_what_would_not_hold_does_not_start(
    connectors: ModuleType, keyring: Path, flags: dict[str, Any], groups: int, reason: str
) -> None:
    with pytest.raises(SettingsError, match=reason):
        made(connectors, configured(keyring, **flags), groups)


def test_a_reset_is_told_though_nothing_runs(connectors: ModuleType, keyring: Path) -> None:
    connector = made(connectors, configured(keyring))
    pool = SimpleNamespace(cached_block_hash_to_block={})
    connector.bind_gpu_block_pool(pool)
    assert not connector.has_pending_push_work()
    connector.set_xfer_handshake_metadata({0: connectors.Handshake(holder_id(OURS).decode())})
    assert not connector.has_pending_push_work()
    pool.cached_block_hash_to_block = {}
    assert connector.has_pending_push_work()
    assert connector.build_connector_meta(nothing_scheduled()).orders == Orders(cleared=True)
    assert not connector.has_pending_push_work()
    assert connector.reset_cache()
    assert connector.has_pending_push_work()


# ---- why loads are not made layer by layer within a step -------------------------------------------------------------


@pytest.mark.parametrize(("is_waited_for", "announced"), [(True, 0), (False, 4)])
def test_what_is_loaded_within_a_step_is_announced_before_it_is_there(is_waited_for: bool, announced: int) -> None:
    """vLLM's own manager of blocks, asked as its scheduler asks: for a request that is set aside until its load is
    over, and for one whose layers would be waited for within the step that is being made."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    layout = KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    manager = KVCacheManager(layout, 128, 16, 16, enable_kv_cache_events=True)
    hasher = get_request_block_hasher(16, sha256)
    request = Request("one", list(range(70)), SamplingParams(max_tokens=1), None, block_hasher=hasher)
    loaded = {"num_external_computed_tokens": 64, "delay_cache_blocks": is_waited_for}
    assert manager.allocate_slots(request, 0 if is_waited_for else 6, **loaded) is not None
    assert sum(len(event.block_hashes) for event in manager.take_events()) == announced
