"""The pools that a worker opens: how they are written on a command line, and what it tells of them."""

import argparse
import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest

from cachecore.store.pools import Accepted, BucketPool, DirectoryPool, Extent, PoolBounds, RedisPool, SealedFrame
from cachecore.store.pools.journal import ListingReader, read_changes
from tests.cachecore.store.pools.runs import make_frames, make_run
from workers.openai.pools import PoolCollector, mount_pools
from workers.openai.server import WorkerServer
from workers.pools import PIECE_BYTES, OpenPools, PoolSettings, add_pool_arguments, pools_of


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_pool_arguments(parser)
    return parser.parse_args(words)


class Desk(OpenPools):
    """As an engine's tier is one."""

    offers: Mapping[str, int] = {"stored": 3}
    means: Mapping[str, int] = {"used": 4}
    waiting = 2

    def describe(self, codec: str = "raw") -> list[dict[str, Any]]:
        return super().describe(codec)


def test_no_pool_is_none() -> None:
    assert pools_of(parsed()) is None


def test_pools_of_every_kind_are_made_as_they_are_written(tmp_path: Path) -> None:
    pools = pools_of(
        parsed(
            *("--pool", f"here=dir:{tmp_path}"),
            *("--pool", "there=redis://127.0.0.1:1/2"),
            *("--pool", "far=s3://bucket/some/prefix?endpoint=http://127.0.0.1:1&region=eu"),
            *("--pool-bytes-max", "1.5GiB"),
            *("--pool-tenant-bytes-max", "500MiB"),
            *("--pool-idle-hours", "2"),
            *("--pool-run-blocks", "6"),
            *("--pool-codec", "raw"),
            "--pool-means",
        )
    )
    assert pools is not None
    kinds = {name: type(pool) for name, pool in pools.pools.items()}
    assert kinds == {"here": DirectoryPool, "there": RedisPool, "far": BucketPool}
    assert (pools.settings.run_blocks, pools.settings.codec, pools.settings.means) == (6, "raw", True)
    bounds = PoolBounds(3 << 29, 500 << 20, idle_seconds_max=7200.0)
    assert [pool.bounds for pool in pools.pools.values()] == [bounds] * 3  # type: ignore[attr-defined]
    assert pools.describe("i8") == []


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--pool", "shared"), "NAME=dir"),
        (("--pool", "a/b=dir:/"), "NAME=dir"),
        (("--pool", "shared=/tmp"), "NAME=dir"),
        (("--pool", "shared=dir:/does/not/exist"), "is no directory"),
        (("--pool", "shared=redis://host:70000"), "port"),
        (("--pool", "shared=s3://"), "s3://bucket/prefix"),
        (("--pool", "shared=s3://me:secret@bucket"), "environment"),
        (("--pool", "shared=s3://bucket?secret=x"), "secret is no option"),
        (("--pool", "shared=s3://bucket?ca=/nowhere/ca.crt"), "cannot read /nowhere/ca.crt: No such file"),
        (("--pool", f"shared=s3://bucket?ca={__file__}"), "shared=s3"),
        (("--pool", "shared=s3://bucket?ca=/a&endpoint=http://host:1"), "begin the endpoint with https"),
        (("--pool", "shared=rediss://host?ca=/nowhere/ca.crt"), "there is no file '/nowhere/ca.crt'"),
        (("--pool", f"shared=rediss://host?ca={__file__}"), "its certificates cannot be used"),
        (("--pool", "shared=dir:/", "--pool", "shared=dir:/"), "already"),
        (("--pool", "shared=dir:/", "--pool-run-blocks", "0"), "1 to"),
        (("--pool", "shared=dir:/", "--pool-bytes-max", "0"), "positive"),
    ],
)
def test_what_cannot_be_a_pool_is_said(words: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        pools_of(parsed(*words))


def test_a_size_that_is_none_is_said() -> None:
    with pytest.raises(argparse.ArgumentError, match="no size such as"):
        parsed("--pool-bytes-max", "10 gigabytes")


async def test_a_pool_is_described_once_it_was_reached_and_others_stop_nobody(tmp_path: Path) -> None:
    settings = PoolSettings(PoolBounds(1 << 24), run_blocks=3)
    pools = OpenPools([f"here=dir:{tmp_path}", "there=redis://127.0.0.1:1"], settings)
    await pools.start()
    holder = pools.pools["here"].holder
    assert holder is not None
    expected = {"name": "here", "generation": holder.generation, "run_blocks": 3, "codec": "i8"}
    assert pools.describe("i8") == [expected]
    await pools.close()


async def test_what_a_worker_tells_over_http_of_pools_on_another_loop(tmp_path: Path) -> None:
    pools = Desk([f"shared=dir:{tmp_path}"])
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def there(step: object) -> object:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(step, loop))  # type: ignore[arg-type]

    app = FastAPI()
    mount_pools(app, pools, poll_seconds=0.05)
    server = WorkerServer(app)
    await server.start()
    try:
        await there(pools.start())
        runs = [make_run(seed, blocks=40) for seed in range(PIECE_BYTES // 640 + 20)]
        first = pools.journal.next
        for run in runs:
            outcome = await there(pools.pools["shared"].put(run, [SealedFrame(Extent(0, 6), [b"frame"])]))
            assert outcome == Accepted(new=True)
        async with httpx.AsyncClient(base_url=server.url) as http:
            listed = await http.get("/kv_pools/shared/runs")
            told = read_changes((await http.get(f"/kv_pools/changes?since={first}")).content)
            late = read_changes((await http.get(f"/kv_pools/changes?since={told.next}")).content)
            reset = read_changes((await http.get("/kv_pools/changes")).content)
            unknown = [
                (await http.get(path)).status_code for path in ("/kv_pools/other/runs", "/kv_pools/changes?since=x")
            ]
        reader = ListingReader()
        found = [document.run() for document in reader.feed(listed.content)]
        assert len(listed.content) > PIECE_BYTES
        assert {run.key.name for run in found} == {run.key.name for run in runs}
        assert reader.whole
        assert (len(told.changes), told.next, told.reset) == (len(runs), pools.journal.next, False)
        assert (late.changes, late.next) == ([], told.next)
        assert (reset.reset, reset.next) == (True, told.next)
        assert unknown == [404, 400]
    finally:
        await server.stop()
        await there(pools.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def test_metrics_say_what_a_pool_holds_and_did(tmp_path: Path) -> None:
    pools = Desk([f"shared=dir:{tmp_path}"], PoolSettings(PoolBounds(1 << 20)))
    await pools.start()
    pool, run = pools.pools["shared"], make_run(1)
    await pool.put(run, make_frames(run))
    await pool.put(run, make_frames(run))
    await pool.get(run.key)
    await pool.get(make_run(2).key)
    registry = CollectorRegistry()
    registry.register(PoolCollector(pools))
    text = generate_latest(registry).decode()
    await pools.close()
    for line in (
        'ropeway_worker_pool_offers_total{outcome="stored"} 3.0',
        'ropeway_worker_pool_means_total{done="used"} 4.0',
        "ropeway_worker_pool_waiting 2.0",
        'ropeway_worker_pool_up{pool="shared"} 1.0',
        'ropeway_worker_pool_runs{pool="shared"} 1.0',
        'ropeway_worker_pool_bytes_max{pool="shared"} 1.048576e+06',
        'ropeway_worker_pool_hits_total{pool="shared"} 1.0',
        'ropeway_worker_pool_present_total{pool="shared"} 1.0',
        'ropeway_worker_pool_misses_total{pool="shared",reason="absent"} 1.0',
        'ropeway_worker_pool_first_frame_seconds_count{pool="shared"} 1.0',
        'ropeway_worker_pool_write_seconds_bucket{le="+Inf",pool="shared"} 1.0',
    ):
        assert line in text.splitlines(), line
