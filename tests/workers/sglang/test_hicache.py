"""SGLang's storage interface over every kind of pool: what was stored comes back byte for byte, all else is a miss."""

import hashlib
import logging
from pathlib import Path
from typing import Any

import pytest

from cachecore.scope import Keyring
from cachecore.store.pools import SealedFrame, hckv
from tests.workers.sglang.conftest import OpenStorage
from tests.workers.sglang.hostpools import PAGES, FlatOnly, HostPool, Logical, Tensor, content
from tests.workers.sglang.labs import DirectoryLab, Lab

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


def chain(*tokens: str) -> list[str]:
    """Names of pages as SGLang makes them: each of all tokens up to there."""
    names, digest = [], b""
    for token in tokens:
        digest = hashlib.sha256(digest + token.encode()).digest()
        names.append(digest.hex())
    return names


KEYS = chain("a", "b", "c", "d")


def filled(**facts: Any) -> HostPool:
    """A host pool whose first four pages are the four of KEYS."""
    pool = HostPool(**facts)
    for page in range(4):
        pool.write(page, page)
    return pool


# ---- every kind of pool ----------------------------------------------------------------------------------------------


def test_pages_come_back_to_wherever_they_are_wanted(lab: Lab, open_storage: OpenStorage) -> None:
    source, target = filled(), HostPool()
    writer = open_storage(lab, source)
    assert writer.batch_set_v1(KEYS, source.places(0, 1, 2, 3)) == [True] * 4
    reader = open_storage(lab, target)
    assert reader.batch_exists(KEYS) == 4
    assert reader.batch_get_v1(KEYS, target.places(9, 3, 12, 0)) == [True] * 4
    assert [target.read(page) for page in (9, 3, 12, 0)] == [content(page, source.page_bytes) for page in range(4)]
    assert {target.read(page) for page in {*range(PAGES)} - {9, 3, 12, 0}} == {bytes(source.page_bytes)}
    assert (writer.counts, reader.counts) == ({"stored": 4}, {"loaded": 4})


def test_a_prefix_ends_with_the_first_page_that_is_missing(lab: Lab, open_storage: OpenStorage) -> None:
    source, target = filled(), HostPool()
    storage = open_storage(lab, source)
    assert storage.batch_set_v1([KEYS[0], KEYS[1], KEYS[3]], source.places(0, 1, 3)) == [True] * 3
    assert storage.batch_exists(KEYS) == 2
    assert [storage.exists(key) for key in KEYS] == [True, True, False, True]
    reader = open_storage(lab, target)
    assert reader.batch_get_v1(KEYS, target.places(0, 1, 2, 3)) == [True, True, False, False]
    assert target.read(3) == bytes(source.page_bytes)
    assert reader.counts == {"absent": 1, "loaded": 2}


def test_what_is_there_is_not_written_again(lab: Lab, open_storage: OpenStorage) -> None:
    source = filled()
    storage = open_storage(lab, source)
    assert storage.batch_set_v1(KEYS[:2], source.places(0, 1)) == [True, True]
    assert storage.batch_set_v1(KEYS, source.places(0, 1, 2, 3)) == [True] * 4
    assert storage.counts == {"present": 2, "stored": 4}
    assert lab.stored() == 4


@pytest.mark.parametrize("place", [20, 250, 399])
def test_a_damaged_page_is_a_miss_that_is_counted_and_removed(lab: Lab, open_storage: OpenStorage, place: int) -> None:
    source, target = filled(), HostPool()
    storage = open_storage(lab, source)
    storage.batch_set_v1(KEYS[:1], source.places(0))
    lab.damage(lambda data: data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    reader = open_storage(lab, target)
    assert reader.batch_get_v1(KEYS[:1], target.places(0)) == [False]
    assert target.kv_buffer.memory == bytes(len(target.kv_buffer.memory))
    assert reader.counts == {"damaged": 1}
    assert reader.batch_exists(KEYS) == 0
    assert lab.stored() == 0


def test_a_pool_that_is_away_is_a_miss_and_one_that_is_back_is_used_again(lab: Lab, open_storage: OpenStorage) -> None:
    source = filled()
    assert open_storage(lab, source).batch_set_v1(KEYS[:2], source.places(0, 1)) == [True, True]
    storage = open_storage(lab, source, {"stall_seconds": 0.2})
    lab.take_away()
    try:
        assert storage.batch_exists(KEYS[:2]) == 0
        assert storage.batch_get_v1(KEYS[:2], source.places(0, 1)) == [False, False]
        assert storage.batch_set_v1(KEYS[2:], source.places(2, 3)) == [False, False]
    finally:
        lab.bring_back()
    again = open_storage(lab, source)
    assert again.batch_exists(KEYS[:2]) == 2
    assert again.batch_get_v1(KEYS[:2], source.places(0, 1)) == [True, True]


def test_only_what_is_cleared_goes(lab: Lab, open_storage: OpenStorage) -> None:
    source = filled()
    mine = open_storage(lab, source)
    other = open_storage(lab, source, {"weights": "another-model@1"})
    mine.batch_set_v1(KEYS[:2], source.places(0, 1))
    other.batch_set_v1(KEYS[:1], source.places(2))
    assert mine.clear() is True
    assert (mine.batch_exists(KEYS), other.batch_exists(KEYS)) == (0, 1)
    assert lab.stored() == 1


def test_tensors_come_and_go_where_pages_do_not(lab: Lab, open_storage: OpenStorage) -> None:
    source = filled()
    storage = open_storage(lab, source, {"interface_v1": 0})
    pages = [source.get_data_page(page * source.page_size) for page in range(3)]
    assert storage.batch_set(KEYS[:3], pages) is True
    assert storage.batch_exists(KEYS) == 3
    targets = [source.get_dummy_flat_data_page() for _ in KEYS]
    found = storage.batch_get(KEYS, targets)
    assert found == [*targets[:3], None]
    assert [bytes(target.memory) for target in targets[:3]] == [content(page, source.page_bytes) for page in range(3)]
    target = source.get_dummy_flat_data_page()
    assert storage.set(KEYS[3], pages[0]) is True
    assert storage.get(KEYS[3], target) is target
    assert target.memory == pages[0].memory
    assert storage.get("0" * 64, target) is None


# ---- whose a page is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("halves", [2, 1])
@pytest.mark.parametrize("interface_v1", [0, 1])
def test_every_layout_comes_back_as_it_was(
    directory: DirectoryLab, open_storage: OpenStorage, layout: str, halves: int, interface_v1: int
) -> None:
    source, target = filled(layout=layout, halves=halves), HostPool(layout=layout, halves=halves)
    writer = open_storage(directory, source, {"interface_v1": interface_v1}, is_mla_model=halves == 1)
    reader = open_storage(directory, target, {"interface_v1": interface_v1}, is_mla_model=halves == 1)
    assert writer.batch_set_v1(KEYS, source.places(0, 1, 2, 3)) == [True] * 4
    assert reader.batch_get_v1(KEYS, target.places(4, 5, 6, 7)) == [True] * 4
    assert [target.read(page) for page in range(4, 8)] == [source.read(page) for page in range(4)]


def test_a_pool_that_does_not_say_where_pages_lie_is_copied(directory: DirectoryLab, open_storage: OpenStorage) -> None:
    source = FlatOnly(layout="layer_first")
    source.write(0, "x")
    storage = open_storage(directory, source)
    assert storage.batch_set_v1(KEYS[:1], source.places(0)) == [True]
    assert storage.batch_get_v1(KEYS[:1], source.places(5)) == [True]
    assert source.read(5) == source.read(0) == content("x", source.page_bytes)


def test_a_pool_without_memory_misses_nothing(directory: DirectoryLab, open_storage: OpenStorage) -> None:
    storage = open_storage(directory, Logical())
    assert storage.batch_exists(KEYS) == 4
    assert storage.batch_get_v1(KEYS, None) == storage.batch_set_v1(KEYS, None) == [True] * 4
    assert directory.stored() == 0


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "weights": ({"weights": "a-model@2"}, {}, {}),
    "tenant": ({"tenant": "ann"}, {}, {}),
    "interface": ({"interface_v1": 0}, {}, {}),
    "model": ({}, {"model_name": "b-model"}, {}),
    "tensor rank": ({}, {"tp_rank": 1, "tp_size": 2}, {}),
    "tensor size": ({}, {"tp_size": 2}, {}),
    "stage": ({}, {"pp_rank": 1, "pp_size": 2}, {}),
    "context rank": ({}, {"attn_cp_rank": 1, "attn_cp_size": 2}, {}),
    "layout": ({}, {}, {"layout": "layer_first"}),
    "head layout": ({}, {}, {"layout": "page_head"}),
    "dtype": ({}, {}, {"dtype": "torch.float16"}),
    "heads": ({}, {}, {"head_num": 4, "head_dim": 2}),
    "layers": ({}, {}, {"start_layer": 3, "end_layer": 6}),
}


@pytest.mark.parametrize("difference", OTHERS)
def test_nobody_reads_what_is_not_of_its_own_kind(
    directory: DirectoryLab, open_storage: OpenStorage, difference: str
) -> None:
    extra, config, facts = OTHERS[difference]
    source = filled()
    open_storage(directory, source).batch_set_v1(KEYS, source.places(0, 1, 2, 3))
    target = HostPool(**facts)
    other = open_storage(directory, target, extra, **config)
    assert other.batch_exists(KEYS) == 0
    assert other.batch_get_v1(KEYS, target.places(0, 1, 2, 3)) == [False] * 4
    assert not any(target.kv_buffer.memory)
    assert other.batch_set_v1(KEYS[:1], target.places(0)) == [True]
    assert directory.stored() == 5


@pytest.mark.parametrize(
    "started", [{"dtype": "float16"}, {"dtype": "bfloat16", "quantization": "fp8"}], ids=["dtype", "quantization"]
)
def test_what_a_server_was_started_with_counts(
    directory: DirectoryLab,
    open_storage: OpenStorage,
    adapter: Any,
    monkeypatch: pytest.MonkeyPatch,
    started: dict[str, str],
) -> None:
    source = filled()
    open_storage(directory, source).batch_set_v1(KEYS, source.places(0, 1, 2, 3))
    monkeypatch.setattr(adapter, "_started_with", lambda: started)
    assert open_storage(directory, source).batch_exists(KEYS) == 0
    monkeypatch.setattr(adapter, "_started_with", lambda: {"dtype": "bfloat16"})
    monkeypatch.setattr(adapter.sglang, "__version__", "0.5.24")
    assert open_storage(directory, source).batch_exists(KEYS) == 0


def test_ranks_that_have_the_same_pages_share_them(directory: DirectoryLab, open_storage: OpenStorage) -> None:
    source = filled(halves=1)
    writer = open_storage(directory, source, tp_rank=0, tp_size=8, is_mla_model=True)
    writer.batch_set_v1(KEYS, source.places(0, 1, 2, 3))
    target = HostPool(halves=1)
    reader = open_storage(directory, target, tp_rank=5, tp_size=8, is_mla_model=True)
    assert reader.batch_get_v1(KEYS, target.places(0, 1, 2, 3)) == [True] * 4
    assert target.read(2) == content(2, source.page_bytes)


def test_another_keyring_finds_nothing_and_forges_nothing(
    directory: DirectoryLab, open_storage: OpenStorage, tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    Keyring.generate().save(other)
    source = filled()
    open_storage(directory, source).batch_set_v1(KEYS, source.places(0, 1, 2, 3))
    stranger = open_storage(directory, source, {"keyring": str(other)})
    assert stranger.batch_exists(KEYS) == 0


def test_a_page_under_anothers_name_is_a_miss(directory: DirectoryLab, open_storage: OpenStorage) -> None:
    source = filled()
    storage = open_storage(directory, source)
    storage.batch_set_v1(KEYS[:1], source.places(0))
    (first,) = directory.files()
    storage.batch_set_v1(KEYS[1:2], source.places(1))
    (second,) = set(directory.files()) - {first}
    second.write_bytes(first.read_bytes())
    assert storage.batch_get_v1(KEYS[:2], source.places(0, 1)) == [True, False]
    assert storage.counts["damaged"] == 1


@pytest.mark.parametrize("place", [30, 350, -1], ids=["header", "payload", "tag"])
def test_a_forged_page_is_a_miss_though_its_checksum_is_right(
    directory: DirectoryLab, open_storage: OpenStorage, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = filled(), HostPool()
    storage = open_storage(directory, source)
    storage.batch_set_v1(KEYS[:1], source.places(0))
    (file,) = directory.files()
    index, frames = hckv.decode(file.read_bytes())
    forged = bytearray(b"".join(bytes(buffer) for buffer in frames[0].buffers))
    forged[place] ^= 1
    encoded = hckv.encode(index.run, [SealedFrame(frames[0].layers, [forged])])
    file.write_bytes(b"".join(bytes(buffer) for buffer in encoded.buffers))
    assert open_storage(directory, target).batch_get_v1(KEYS[:1], target.places(0)) == [False]
    assert not any(target.kv_buffer.memory)
    assert "is not what was put there" in caplog.text


# ---- nothing raises --------------------------------------------------------------------------------------------------


def test_what_makes_no_sense_is_a_miss(
    directory: DirectoryLab, open_storage: OpenStorage, caplog: pytest.LogCaptureFixture
) -> None:
    source = filled()
    storage = open_storage(directory, source)
    with caplog.at_level(logging.ERROR):
        assert storage.batch_get_v1(KEYS, source.places(0)) == [False] * 4
        assert storage.batch_set_v1(KEYS, None) == [False] * 4
        assert storage.batch_set(KEYS[:1], [Tensor(8, contiguous=False)]) is False
        assert storage.batch_get(KEYS[:2], [Tensor(8)]) == [None, None]
        assert storage.get(KEYS[0]) is None
    assert "the engine goes on without it" in caplog.text
    assert storage.batch_exists([]) == 0
    assert storage.batch_get_v1([], source.places()) == storage.batch_set_v1([], source.places()) == []


def test_before_a_pool_is_registered_and_after_the_end_everything_is_a_miss(
    directory: DirectoryLab, open_storage: OpenStorage, adapter: Any
) -> None:
    source = filled()
    storage = open_storage(directory, source)
    storage.batch_set_v1(KEYS, source.places(0, 1, 2, 3))
    storage.close()
    storage.close()
    assert storage.batch_exists(KEYS) == 0
    assert storage.batch_get_v1(KEYS, source.places(0, 1, 2, 3)) == [False] * 4
    assert storage.batch_set_v1(KEYS, source.places(0, 1, 2, 3)) == [False] * 4
    assert storage.clear() is False
    fresh = open_storage(directory, source)
    fresh._pools.clear()
    assert fresh.exists(KEYS[0]) is False
    assert fresh.batch_get_v1(KEYS, source.places(0, 1, 2, 3)) == [False] * 4


def test_a_page_that_is_larger_than_the_pool_is_declined(directory: DirectoryLab, open_storage: OpenStorage) -> None:
    source = filled()
    storage = open_storage(directory, source, {"bytes_max": 300})
    assert storage.batch_set_v1(KEYS, source.places(0, 1, 2, 3)) == [False] * 4
    assert storage.counts == {"declined": 4}


def test_it_says_nothing_of_itself_that_sglang_would_have_to_know(
    directory: DirectoryLab, open_storage: OpenStorage
) -> None:
    storage = open_storage(directory, HostPool())
    assert storage.get_stats() is None
    assert "DirectoryPool" in repr(storage)
