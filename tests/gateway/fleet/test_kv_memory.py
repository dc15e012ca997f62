"""How much KV memory workers have, and how full it is: what prices work and pulls by it."""

from typing import Any

import pytest

from cachecore.blocks import EMPTY_CHAIN, HASH_KEY_BYTES, BlockHasher, pack_tokens
from cachecore.holders import Tier
from cachecore.index.contract import NO_MATCH, Removed, Stored
from cachecore.index.memory import MemoryIndex
from gateway.config import WorkerConfig
from gateway.fleet.engines.contract import Discovery, EngineLoad
from gateway.fleet.engines.questions import Metrics
from gateway.fleet.engines.server_info import read_server_info
from gateway.fleet.engines.sglang import _read_server_info
from gateway.fleet.engines.vllm import _read_metrics
from gateway.fleet.knowledge import CONTEXT_TOKENS_MAX, Knowledge
from gateway.fleet.worker import ModelPool, WorkerRecord

BLOCK = 16
VLLM = 'vllm:cache_config_info{block_size="32",num_gpu_blocks="%s"} 1.0\n'


class Asked:
    """Questions that need no answer here."""

    url = "http://127.0.0.1:1"


@pytest.mark.parametrize(("blocks", "tokens"), [("728", 728 * 32), ("None", 0)])
def test_vllm_says_it_in_its_metrics(blocks: str, tokens: int) -> None:
    discovery = Discovery({})
    _read_metrics(Metrics(VLLM % blocks), discovery)
    assert discovery.kv_tokens == tokens


def test_sglang_and_our_own_workers_say_it_in_their_info() -> None:
    ask: Any = Asked()
    discovery = Discovery({})
    _read_server_info({"max_total_num_tokens": 123_456, "page_size": 64}, discovery, ask)
    assert discovery.kv_tokens == 123_456
    discovery = Discovery({})
    read_server_info({"block_size": 16, "blocks_total": 100}, discovery, ask)
    assert discovery.kv_tokens == 1600
    assert Discovery({}).completed(discovery).kv_tokens == 1600


def test_fill_is_what_the_index_counts() -> None:
    index = MemoryIndex()
    knowledge = Knowledge(index)
    record = WorkerRecord.of(WorkerConfig(url="http://127.0.0.1:1", name="w"))
    holder = record.holder()
    account = knowledge.accounting.account("w")
    load = EngineLoad(0, 0, 0.0)
    hasher = BlockHasher(b"k" * HASH_KEY_BYTES, BLOCK)
    root = hasher.root(b"scope")
    chain = hasher.chain(root, pack_tokens(list(range(10 * BLOCK))))
    index.apply(holder, 1, [Stored(root, chain), Stored(root, chain)])
    assert index.blocks_held(holder, Tier.L0) == 10
    knowledge.report_load(holder, load, 0, 1.0)
    assert account.fill == 1.0  # of a memory that is not known
    knowledge.declare_capacity(holder, 8, 40 * BLOCK)
    knowledge.report_load(holder, load, 0, 1.0)
    assert account.fill == 1.0  # nor the size of a block
    knowledge.accounting.dispatch("r", "w", 0, 0.0, 100, 0.1)
    knowledge.accounting.pin("r", chain, BLOCK)
    knowledge.report_load(holder, load, 0, 1.0)
    assert account.fill == 0.25
    index.apply(holder, 2, [Removed(chain), Removed(chain)])
    knowledge.report_load(holder, load, 0, 1.0)
    assert (account.fill, index.blocks_held(holder, Tier.L0)) == (0.0, 0)
    knowledge.declare_capacity(holder, 8, 40 * BLOCK)
    assert account.fill == 1.0


def test_the_shortest_context_is_known() -> None:
    knowledge, pool = Knowledge(MemoryIndex()), ModelPool("m")
    for number, length in enumerate((8000, 0, 4000)):
        record = WorkerRecord.of(WorkerConfig(url=f"http://127.0.0.1:{number + 1}", name=f"w{number}"))
        record.holders = (record.holder(),)
        record.discovery = Discovery({}, max_model_len=length)
        pool.workers.append(record)
    assert knowledge.context_tokens_min == CONTEXT_TOKENS_MAX
    snapshot = knowledge.snapshot(pool, pool.workers, NO_MATCH, EMPTY_CHAIN, 10, 0.0, False)
    assert [view.context_tokens_max for view in snapshot.workers] == [8000, 0, 4000]
    assert knowledge.context_tokens_min == 4000
