"""The scheduler's side, told what vLLM's scheduler would tell it."""

from collections.abc import Mapping, Sequence

import pytest

from cachecore.blocks import HASH_BYTES
from cachecore.scope import Fidelity, Salt
from tests.workers.vllm.support import (
    KEYRING,
    PROMPT,
    RIVAL,
    SALT,
    SIZE,
    TENANT,
    FakeRequest,
    chain_of,
    plan_of,
    planned,
    scheduler,
)
from workers.vllm.orders import Export, Orders
from workers.vllm.requests import Phase, Requests, Scheduled

TABLE = list(range(20, 31))
"""The blocks of a prompt: its ten full ones, and the last."""
NO_TABLES: Mapping[str, Sequence[int]] = {}


def step(requests: Requests, *scheduled: Scheduled, tables: Mapping[str, Sequence[int]] = NO_TABLES) -> Orders:
    return requests.step(scheduled, tables.__getitem__)


def begin(requests: Requests, request: FakeRequest, table: Sequence[int] = TABLE, computed: int = 0) -> Orders:
    """Its first step computes all that is left of its prompt."""
    requests.allocated(request.request_id, table, 0)
    orders = step(requests, Scheduled(request.request_id, table, True, computed))
    request.num_computed_tokens = request.num_prompt_tokens
    return orders


def load(requests: Requests, request: FakeRequest, table: Sequence[int] = TABLE, computed: int = 0) -> Orders:
    """As far as the engine waits for it."""
    requests.add(request)
    tokens = requests.match(request.request_id, computed)
    assert tokens
    requests.allocated(request.request_id, table, tokens)
    request.num_computed_tokens = computed + tokens
    return step(requests)


def names_in(export: Export) -> list[bytes]:
    return [export.names[at : at + HASH_BYTES] for at in range(0, len(export.names), HASH_BYTES)]


# ---- loading ---------------------------------------------------------------------------------------------------------


def test_a_planned_prefix_is_claimed_loaded_and_over() -> None:
    requests = scheduler()
    request = planned()
    requests.add(request)
    assert requests.phase_of("one") is Phase.LOOKED_UP
    assert requests.match("one", 0) == 10 * SIZE
    assert requests.phase_of("one") is Phase.CLAIMED
    assert not requests.has_orders
    requests.allocated("one", TABLE, 10 * SIZE)
    (order,) = step(requests).loads
    assert (order.request_id, order.cache_salt, order.fidelity) == ("one", SALT, Fidelity.EXACT)
    ((pull, first, blocks),) = order.runs
    assert (pull.plan.run, first, blocks) == (plan_of().run, 0, tuple(TABLE[:10]))
    assert requests.phase_of("one") is Phase.LOADING
    requests.received(["one"], [])
    assert requests.phase_of("one") is Phase.DONE
    assert requests.match("one", 0) == 0  # preempted, say: what was pulled once is not pulled twice
    assert not step(requests)


@pytest.mark.parametrize(("computed_blocks", "claimed"), [(0, 10), (3, 7), (9, 1), (10, 0)])
def test_only_what_is_not_there_is_claimed(computed_blocks: int, claimed: int) -> None:
    requests = scheduler()
    requests.add(planned())
    assert requests.match("one", computed_blocks * SIZE) == claimed * SIZE


def test_the_rest_of_a_run_goes_into_the_blocks_behind() -> None:
    requests = scheduler()
    orders = load(requests, planned(), computed=3 * SIZE)
    ((_, first, blocks),) = orders.loads[0].runs
    assert (first, blocks) == (3, tuple(TABLE[3:10]))


@pytest.mark.parametrize(
    ("runs", "computed", "claimed"),
    [
        ([(0, 4), (4, 9)], 0, [(0, 4), (4, 9)]),
        ([(4, 9), (0, 4)], 0, [(0, 4), (4, 9)]),
        ([(0, 4), (4, 9)], 2, [(2, 4), (4, 9)]),
        ([(0, 4), (4, 9)], 5, [(5, 9)]),
        ([(0, 4), (6, 9)], 0, [(0, 4)]),
        ([(0, 6), (3, 9)], 0, [(0, 6), (6, 9)]),
        ([(2, 9)], 0, []),
        ([(2, 9)], 2, [(2, 9)]),
        ([(0, 4)], 4, []),
    ],
)
def test_runs_are_claimed_as_far_as_they_leave_no_gap(
    runs: list[tuple[int, int]], computed: int, claimed: list[tuple[int, int]]
) -> None:
    requests = scheduler()
    requests.add(planned("one", *(plan_of(first, end) for first, end in runs)))
    tokens = requests.match("one", computed * SIZE)
    assert tokens == sum(end - first for first, end in claimed) * SIZE
    if tokens:
        requests.allocated("one", TABLE, tokens)
        ordered = step(requests).loads[0].runs
        assert [(run.first_block, run.first_block + len(run.blocks)) for run in ordered] == claimed


def test_a_full_prompt_is_claimed_whole() -> None:
    """vLLM computes the last token of what was loaded itself."""
    requests = scheduler()
    requests.add(planned(all_token_ids=PROMPT[: 10 * SIZE]))
    assert requests.match("one", 0) == 10 * SIZE


def test_a_failed_load_is_not_tried_again() -> None:
    requests = scheduler()
    load(requests, planned())
    requests.received(["one"], ["one"])
    assert requests.phase_of("one") is Phase.FAILED
    assert requests.match("one", 0) == 0


def test_a_claim_without_room_is_asked_again() -> None:
    requests = scheduler()
    requests.add(planned())
    assert [requests.match("one", computed * SIZE) for computed in (0, 4, 0)] == [40, 24, 40]
    assert not step(requests)


def test_a_request_that_is_scheduled_without_a_load_has_lost_its_plans() -> None:
    requests = scheduler()
    request = planned()
    requests.add(request)
    requests.match("one", 0)
    assert not begin(requests, request).loads
    assert requests.match("one", 0) == 0


@pytest.mark.parametrize("tokens", [4, 44])
def test_what_the_engine_says_it_got_and_was_not_offered_fails_at_once(tokens: int) -> None:
    requests = scheduler()
    requests.add(planned())
    requests.match("one", 0)
    requests.allocated("one", TABLE, tokens)
    (order,) = step(requests).loads
    assert (order.request_id, order.runs) == ("one", ())


def test_requests_that_nobody_knows_are_let_pass() -> None:
    requests = scheduler()
    requests.add(FakeRequest("forged", cache_salt=SALT[:-2] + "xx"))
    assert requests.match("forged", 0) == 0
    requests.allocated("forged", TABLE, 0)
    requests.received(["forged", "unheard"], ["unheard"])
    assert not step(requests, Scheduled("forged", TABLE, True, 0))
    requests.finish("forged", TABLE)
    assert not requests.has_orders
    assert len(requests) == 0


# ---- several at once -------------------------------------------------------------------------------------------------


def test_one_of_two_with_the_same_prefix_loads_it() -> None:
    requests = scheduler()
    first, second = planned("first"), planned("second")
    load(requests, first)
    requests.add(second)
    assert requests.match("second", 0) is None
    requests.received(["first"], [])
    assert requests.match("second", 0) is None  # its blocks are named when it is scheduled
    begin(requests, first, computed=10 * SIZE)
    assert requests.match("second", 10 * SIZE) == 0


def test_what_fails_for_one_fails_for_those_who_waited() -> None:
    """Each would otherwise wait for a deadline of its own, one after the other."""
    requests = scheduler()
    load(requests, planned("first"))
    others = [planned(f"other-{number}") for number in range(3)]
    for other in others:
        requests.add(other)
        assert requests.match(other.request_id, 0) is None
    requests.received(["first"], ["first"])
    assert [requests.match(other.request_id, 0) for other in others] == [0, 0, 0]
    late = planned("late")
    requests.add(late)
    assert requests.match("late", 0) == 10 * SIZE


def test_who_waits_for_a_request_that_is_aborted_loads_it_himself() -> None:
    requests = scheduler()
    load(requests, planned("first"))
    requests.add(planned("second"))
    assert requests.match("second", 0) is None
    requests.finish("first", TABLE[:10])
    assert requests.match("second", 0) == 10 * SIZE


def test_other_prefixes_and_other_salts_wait_for_nobody() -> None:
    requests = scheduler()
    load(requests, planned("first"))
    prompt = [*PROMPT[:4], *reversed(PROMPT[4:])]
    requests.add(planned("other", plan_of(0, 10, prompt=prompt), all_token_ids=prompt))
    assert requests.match("other", 0) is None  # its first block is on its way
    assert requests.match("other", 4) == 9 * SIZE
    salt = KEYRING.mint_salt(Salt(TENANT, Fidelity.QUANTIZED))
    requests.add(planned("worse", plan_of(codec="i8"), cache_salt=salt))
    assert requests.match("worse", 0) == 10 * SIZE


# ---- aborting --------------------------------------------------------------------------------------------------------


def test_nothing_of_an_aborted_load_is_exported() -> None:
    """All of its claim counts as computed, and none of it may be there."""
    requests = scheduler()
    request = planned()
    load(requests, request)
    assert request.num_computed_tokens == 10 * SIZE
    requests.finish("one", TABLE[:10])
    orders = step(requests)
    assert (orders.cancelled, orders.exported) == (["one"], [])
    requests.received(["one"], [])
    assert not step(requests)
    assert len(requests) == 0


def test_nothing_is_exported_of_what_has_come_and_was_never_scheduled() -> None:
    requests = scheduler()
    load(requests, planned())
    requests.received(["one"], [])
    requests.finish("one", TABLE[:10])
    assert not step(requests)


@pytest.mark.parametrize("is_claimed", [False, True])
def test_a_request_that_leaves_before_it_loads_leaves_nothing(is_claimed: bool) -> None:
    requests = scheduler()
    requests.add(planned())
    if is_claimed:
        requests.match("one", 0)
    requests.finish("one", [])
    assert not step(requests)


# ---- exporting -------------------------------------------------------------------------------------------------------


def test_blocks_are_exported_once_a_step_that_computed_them_is_past() -> None:
    requests = scheduler()
    request = FakeRequest()
    requests.add(request)
    assert not begin(requests, request)
    orders = step(requests, Scheduled("one", [], False, 42), tables={"one": TABLE})
    (export,) = orders.exported
    assert names_in(export) == chain_of()
    assert (export.blocks, export.first_block, export.parent) == (tuple(TABLE[:10]), 0, None)
    assert list(memoryview(export.tokens).cast("I")) == PROMPT[:40]
    request.all_token_ids += [5, 6]
    request.num_computed_tokens = 44
    (export,) = step(requests, Scheduled("one", [], False, 44), tables={"one": TABLE}).exported
    assert (export.first_block, export.blocks) == (10, (TABLE[10],))
    assert export.parent == chain_of()[-1]
    assert names_in(export) == chain_of([*PROMPT, 5, 6])[10:]
    assert not step(requests, Scheduled("one", [], False, 45), tables={"one": TABLE})


def test_a_prompt_in_chunks_is_exported_chunk_by_chunk() -> None:
    requests = scheduler()
    request = FakeRequest()
    requests.add(request)
    requests.allocated("one", TABLE[:4], 0)
    assert not step(requests, Scheduled("one", TABLE[:4], True, 0))
    orders = step(requests, Scheduled("one", TABLE[4:8], False, 16), tables={"one": TABLE[:8]})
    assert [export.blocks for export in orders.exported] == [tuple(TABLE[:4])]
    request.num_computed_tokens = 32
    requests.finish("one", TABLE[:8])
    assert [export.blocks for export in step(requests).exported] == [tuple(TABLE[4:8])]


def test_the_last_step_of_a_request_is_exported_with_its_end() -> None:
    requests = scheduler()
    request = FakeRequest()
    requests.add(request)
    begin(requests, request)
    requests.finish("one", TABLE)
    assert requests.has_orders
    (export,) = step(requests).exported
    assert export.blocks == tuple(TABLE[:10])
    assert not requests.has_orders


def test_blocks_that_are_known_are_not_exported_again() -> None:
    requests = scheduler()
    first = FakeRequest("first")
    requests.add(first)
    begin(requests, first)
    requests.finish("first", TABLE)
    step(requests)
    second = FakeRequest("second")
    requests.add(second)
    table = [*TABLE[:10], 40]
    begin(requests, second, table, computed=40)
    second.all_token_ids += [5, 6]
    second.num_computed_tokens = 44
    requests.finish("second", table)
    (export,) = step(requests).exported
    assert (export.first_block, export.blocks) == (10, (40,))


def test_blocks_given_to_others_are_dropped_before_they_are_written_to() -> None:
    requests = scheduler()
    first = FakeRequest("first")
    requests.add(first)
    begin(requests, first)
    requests.finish("first", TABLE)
    step(requests)
    second = FakeRequest("second", list(reversed(PROMPT)))
    requests.add(second)
    assert begin(requests, second, [50, TABLE[9], TABLE[8]]).dropped == [TABLE[9], TABLE[8]]
    orders = step(requests, Scheduled("second", [TABLE[7], 60], False, 12), tables={"second": [50, 29, 28, 27, 60]})
    assert orders.dropped == [TABLE[7]]
    assert [export.blocks for export in orders.exported] == [(50, TABLE[9], TABLE[8])]


def test_blocks_of_requests_without_names_are_dropped_as_well() -> None:
    requests = scheduler()
    first = FakeRequest("first")
    requests.add(first)
    begin(requests, first)
    requests.finish("first", TABLE)
    step(requests)
    assert step(requests, Scheduled("picture", TABLE[:2], True, 0)).dropped == TABLE[:2]


def test_what_ended_and_was_given_away_in_one_step_is_dropped_after_it_is_exported() -> None:
    requests = scheduler()
    first = FakeRequest("first")
    requests.add(first)
    begin(requests, first)
    requests.finish("first", TABLE)
    orders = step(requests, Scheduled("picture", TABLE[:2], True, 0))
    assert [export.blocks for export in orders.exported] == [tuple(TABLE[:10])]
    assert orders.dropped == TABLE[:2]


def test_blocks_that_a_load_will_write_to_are_dropped() -> None:
    requests = scheduler()
    first = FakeRequest("first", list(reversed(PROMPT)))
    requests.add(first)
    begin(requests, first)
    requests.finish("first", TABLE)
    step(requests)
    orders = load(requests, planned(), [90, *TABLE[:10]], computed=SIZE)
    assert orders.dropped == TABLE[:10]
    assert orders.loads[0].runs[0].blocks == tuple(TABLE[:9])


def test_hits_are_not_dropped() -> None:
    requests = scheduler()
    first = FakeRequest("first")
    requests.add(first)
    begin(requests, first)
    requests.finish("first", TABLE)
    step(requests)
    second = FakeRequest("second")
    requests.add(second)
    assert begin(requests, second, [*TABLE[:10], 40], computed=40).dropped == []


def test_a_preempted_request_is_exported_from_its_new_blocks() -> None:
    requests = scheduler()
    request = FakeRequest()
    requests.add(request)
    begin(requests, request)
    step(requests, Scheduled("one", [], False, 42), tables={"one": TABLE})
    table = [*TABLE[:3], *range(60, 68)]
    assert not step(requests, Scheduled("one", table, True, 12))
    (export,) = step(requests, Scheduled("one", [], False, 42), tables={"one": table}).exported
    assert (export.first_block, export.blocks) == (3, tuple(range(60, 67)))


def test_loaded_blocks_are_exported_when_their_request_runs() -> None:
    requests = scheduler()
    request = planned()
    load(requests, request)
    requests.received(["one"], [])
    assert not begin(requests, request, computed=40)
    (export,) = step(requests, Scheduled("one", [], False, 42), tables={"one": TABLE}).exported
    assert export.blocks == tuple(TABLE[:10])


def test_a_reset_forgets_what_was_exported() -> None:
    requests = scheduler()
    first = FakeRequest("first")
    requests.add(first)
    begin(requests, first)
    requests.finish("first", TABLE)
    requests.clear()
    assert requests.has_orders
    orders = step(requests)
    assert (orders.cleared, orders.exported) == (True, [])
    second = FakeRequest("second")
    requests.add(second)
    assert begin(requests, second).dropped == []
    requests.finish("second", TABLE)
    assert [export.blocks for export in step(requests).exported] == [tuple(TABLE[:10])]


def test_salts_name_whose_blocks_they_are() -> None:
    requests = scheduler()
    tables = {}
    for number, salt in enumerate((SALT, KEYRING.mint_salt(Salt(RIVAL)), None, "a client's own")):
        request = FakeRequest(str(number), cache_salt=salt)
        tables[str(number)] = [100 * number + block for block in range(11)]
        requests.add(request)
        begin(requests, request, tables[str(number)])
    exports = step(requests, *(Scheduled(name, [], False, 42) for name in tables), tables=tables).exported
    assert [export.cache_salt for export in exports] == [SALT, KEYRING.mint_salt(Salt(RIVAL)), None, "a client's own"]
    # No salt at all is the default tenant's, as that one's own salt is.
    assert [exports[0].names == export.names for export in exports] == [True, False, True, False]
    assert exports[1].names != exports[3].names
