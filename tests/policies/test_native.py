"""What a request costs, by the extension in C and by its twin: the same floats, bit by bit."""

import os
import random
import subprocess
import sys

import pytest

from policies.contract import Evidence, FleetRates, WorkerView
from policies.estimates import Calibration, PrefillModel
from policies.native import native
from policies.pricing import python_tied, python_weigh, tied, weigh
from policies.state.inflight import WorkerAccount


def test_it_is_there_where_it_is_insisted_on() -> None:
    assert native is not None or os.environ.get("ROPEWAY_NATIVE") != "1"


needs_native = pytest.mark.skipif(native is None, reason="the extension is not built")


def drawn_account(draw: random.Random) -> WorkerAccount:
    """A worker with a history: whatever may be, capacities and memory known or not, others' requests, all full."""
    account = WorkerAccount("w", 0, draw.choice([0.0, 0.3, 1.7]))
    account.inflight = draw.choice([0, 1, 2, 7, 40])
    account.waiting = draw.randint(0, account.inflight)
    account.outstanding_prefill_seconds = draw.choice([0.0, draw.random(), 40 * draw.random()])
    account.inflight_tokens = draw.randint(0, 100_000)
    account.running_context_tokens = draw.choice([0, draw.randint(0, 300_000)])
    account.placed = draw.choice([0.0, draw.random(), 1e6 * draw.random()])
    account.capacity_requests = draw.choice([0, 1, 8, 256])
    account._foreign = draw.choice([0, 3, 300])
    account._foreign_until = draw.choice([0.0, 1e3])
    account._backlog_ends_at = draw.choice([0.0, 100.0 + draw.random()])
    account._wait_seconds_min = account.outstanding_prefill_seconds * draw.random()
    account.kv_tokens = draw.choice([0, 0, 200_000])
    account.kv_held_tokens = draw.randint(0, 250_000)
    account._kv_squares = draw.randint(0, 10**9)
    account._kv_pressure = None
    return account


def drawn_view(draw: random.Random) -> WorkerView:
    model = PrefillModel(None, Calibration(draw.choice([1.0, 0.3, 3.1]), draw.choice([1.0, 0.5, 2.2])))
    view = WorkerView("w", 0, drawn_account(draw), model)
    view.matched_tokens = draw.choice([0, 16, 1024, 16_000])
    view.confirmed_tokens = draw.randint(0, view.matched_tokens)
    view.evidence = draw.choice(list(Evidence))
    view.capacity_requests = view.load.capacity_requests  # type: ignore[attr-defined]
    return view


def drawn_rates(draw: random.Random) -> FleetRates:
    if draw.random() < 0.2:
        return FleetRates()
    arrivals = draw.random() * 20
    return FleetRates(arrivals, draw.choice([0.0, draw.random(), 1.7]), 30.0 * arrivals, 30.0, draw.choice([1.0, 1e5]))


@needs_native
@pytest.mark.parametrize("seed", range(20))
def test_the_extension_and_its_twin_agree(seed: int) -> None:
    assert native is not None
    draw = random.Random(seed)
    for _ in range(200):
        views = [drawn_view(draw) for _ in range(draw.choice([1, 2, 3, 8, 65, 100]))]
        question = (draw.randint(16_000, 40_000), views, 100.0 + draw.random(), drawn_rates(draw), draw.random() < 0.5)
        by_c, by_python = native.weigh(*question), python_weigh(*question)
        assert by_c == by_python
        _, _, costs = by_python
        costs[draw.randrange(len(costs))] = min(costs)
        assert native.tied(views, costs) == python_tied(views, costs)


@needs_native
def test_what_the_extension_does_not_know_is_the_twins_to_say() -> None:
    assert native is not None
    draw = random.Random(3)
    plain = [drawn_view(draw) for _ in range(3)]
    rates = drawn_rates(draw)

    class Model(PrefillModel):
        __slots__ = ()

    strange = [drawn_view(draw) for _ in range(3)]
    strange[1].prefill = Model()
    huge = [drawn_view(draw) for _ in range(3)]
    huge[2].matched_tokens = 1 << 70
    for views in (strange, huge, tuple(plain)):
        assert native.weigh(20_000, views, 100.0, rates, False) is None
        assert weigh(20_000, views, 100.0, rates, False) == python_weigh(20_000, views, 100.0, rates, False)
    assert native.tied(huge, [3.0, 2.0, 1.0]) is None
    assert tied(huge, [3.0, 2.0, 1.0]) == [2]
    assert native.tied(tuple(plain), [1.0, 2.0, 3.0]) is None
    assert native.weigh(20_000, [], 100.0, rates, False) is None
    assert native.tied(plain, [1.0]) is None
    assert native.weigh(1 << 70, plain, 100.0, rates, False) is None


@needs_native
def test_errors_of_records_come_through() -> None:
    """The pressure of memory is computed by the record itself."""
    assert native is not None
    draw = random.Random(5)
    view = drawn_view(draw)
    account = view.load
    assert isinstance(account, WorkerAccount)
    account.inflight, account.waiting, account.kv_tokens, account._kv_squares = 2, 0, 1, "no number"  # type: ignore[assignment]
    with pytest.raises(TypeError):
        native.weigh(20_000, [view], 100.0, FleetRates(), False)
    with pytest.raises(TypeError, match="weigh"):
        native.weigh(20_000, [view], 100.0)


@needs_native
def test_classes_without_slots_are_refused() -> None:
    code = """
from policies.contract import Evidence
from policies.estimates import PrefillModel
from policies.native import native
from policies.state.inflight import WorkerAccount
class View:
    load = prefill = matched_tokens = confirmed_tokens = evidence = capacity_requests = None
print(native.weigh(1, [View()], 0.0, (0.0, 0.0, 0.0, 1.0, 1.0), False))
try:
    native.learn(View, WorkerAccount, PrefillModel, dict.fromkeys(Evidence, 1.0), 1.0, 1.0, 1.0, 1.0)
except TypeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "None\nload of <class '__main__.View'> is no slot\n"


def test_without_the_extension_everything_is_as_with_it() -> None:
    code = """
import random
from policies.native import native
from tests.policies.test_native import drawn_rates, drawn_view
from policies.pricing import tied, weigh
draw = random.Random(11)
views = [drawn_view(draw) for _ in range(5)]
waits, works, costs = weigh(20_000, views, 100.0, drawn_rates(draw), True)
print(waits, works, costs, tied(views, costs), native is None)
"""
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"ROPEWAY_NATIVE": wish, "PATH": ""},
        ).stdout
        for wish in ("0", "")
    ]
    assert said[0].rpartition(" ")[0] == said[1].rpartition(" ")[0]
    assert said[0].endswith("True\n")
