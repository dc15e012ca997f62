"""What is served from: which block holds what, and whether it still did when it was read."""

import pytest

from cachecore.blocks import pack_tokens
from cachecore.scope import Fidelity, Salt
from cachecore.transfer.errors import Reason, Unserved
from tests.workers.vllm.support import KEYRING, NAMINGS, PROMPT, SALT, SIZE, TENANT, chain_of
from workers.transfer.runs import HeldRun
from workers.vllm.index import BlockIndex
from workers.vllm.orders import Export, Orders

CHAIN = chain_of()


def export(first: int, end: int, blocks: list[int], fidelity: Fidelity = Fidelity.EXACT) -> Export:
    salt = SALT if fidelity is Fidelity.EXACT else KEYRING.mint_salt(Salt(TENANT, fidelity))
    parent = CHAIN[first - 1] if first else None
    tokens = pack_tokens(PROMPT[first * SIZE : end * SIZE])
    return Export(salt, fidelity, parent, first, b"".join(CHAIN[first:end]), tokens, blocks)


def index_of(*exports: Export) -> BlockIndex:
    index = BlockIndex(NAMINGS.of)
    index.apply(Orders(exported=list(exports)))
    return index


def found(index: BlockIndex, end: int, blocks: int, worst: Fidelity = Fidelity.EXACT) -> HeldRun | None:
    with index.lend(CHAIN[end - 1], blocks, worst) as run:
        return run


def test_a_run_is_found_from_its_tail() -> None:
    index = index_of(export(0, 10, list(range(40, 50))))
    run = found(index, 7, 4)
    assert run is not None
    assert list(run.blocks) == [43, 44, 45, 46]
    assert [held.number for held in run.held] == [3, 4, 5, 6]
    assert (run.held[0].parent, run.fidelity) == (CHAIN[2], Fidelity.EXACT)
    assert [token for held in run.held for token in held.token_ids] == PROMPT[12:28]
    assert run.held[0].naming is not None
    assert run.held[0].naming.scope.key_id == TENANT
    first = found(index, 3, 3)
    assert first is not None
    assert first.held[0].parent is None
    index.vouch(run)


def test_a_run_may_lie_in_blocks_of_several_requests() -> None:
    index = index_of(export(0, 4, [9, 3, 7, 5]), export(4, 6, [1, 8]))
    run = found(index, 6, 5)
    assert run is not None
    assert list(run.blocks) == [3, 7, 5, 1, 8]


@pytest.mark.parametrize(("end", "blocks"), [(10, 11), (10, 9), (4, 5)])
def test_a_run_that_is_not_all_there_is_none(end: int, blocks: int) -> None:
    index = index_of(export(0, 4, [0, 1, 2, 3]), export(5, 10, [5, 6, 7, 8, 9]))
    assert found(index, end, blocks) is None


def test_the_best_copy_is_lent_and_none_that_is_worse_than_asked() -> None:
    index = index_of(export(0, 3, [5, 6, 7], Fidelity.QUANTIZED), export(0, 2, [8, 9]))
    assert found(index, 3, 3) is None
    run = found(index, 3, 3, Fidelity.QUANTIZED)
    assert run is not None
    assert (list(run.blocks), run.fidelity) == ([8, 9, 7], Fidelity.QUANTIZED)


def test_the_second_of_two_equal_blocks_takes_over() -> None:
    index = index_of(export(0, 2, [5, 6]), export(0, 2, [8, 9]))
    index.apply(Orders(dropped=[5]))
    run = found(index, 2, 2)
    assert run is not None
    assert list(run.blocks) == [8, 6]
    index.apply(Orders(dropped=[8, 6]))
    assert found(index, 2, 2) is None
    assert len(index) == 1


def test_what_was_given_away_while_it_was_read_is_not_vouched_for() -> None:
    index = index_of(export(0, 3, [5, 6, 7]))
    run = found(index, 3, 3)
    assert run is not None
    index.apply(Orders(dropped=[6]))
    with pytest.raises(Unserved) as refused:
        index.vouch(run)
    assert refused.value.reason is Reason.STALE
    # The same block with the same name once more: written to in between.
    index.apply(Orders(exported=[export(1, 2, [6])]))
    with pytest.raises(Unserved):
        index.vouch(run)
    again = found(index, 3, 3)
    assert again is not None
    index.vouch(again)


def test_what_is_exported_twice_stays_what_it_is() -> None:
    index = index_of(export(0, 3, [5, 6, 7]))
    run = found(index, 3, 3)
    assert run is not None
    index.apply(Orders(exported=[export(0, 3, [5, 6, 7])]))
    index.vouch(run)
    assert len(index) == 3


def test_a_block_has_one_name() -> None:
    index = index_of(export(0, 3, [5, 6, 7]))
    index.apply(Orders(exported=[export(3, 4, [5])]))
    assert found(index, 3, 3) is None
    assert len(index) == 3


def test_orders_are_carried_out_in_their_order() -> None:
    index = index_of(export(0, 2, [5, 6]))
    index.apply(Orders(cleared=True, exported=[export(2, 4, [6, 7])], dropped=[7]))
    assert len(index) == 1
    assert found(index, 3, 1) is not None
    assert found(index, 1, 1) is None


def test_forged_salts_name_nothing() -> None:
    assert len(index_of(export(0, 2, [5, 6])._replace(cache_salt=SALT[:-1] + "!"))) == 0
