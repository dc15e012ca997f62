"""What an instance uses while all that it has to do is to wait for a pull."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cachecore.scope import Keyring
from tests.gateway.end_to_end.processes import eventually
from tests.vllm.conftest import MOVING_IN_EACH_DTYPE, Pair, Report
from tests.vllm.family import Used, family
from tests.vllm.movers import Movers, ask, info
from tests.vllm.servers import STALL_SECONDS
from tests.vllm.test_layers import HELD, SHORT
from tests.vllm.test_moving import link_to

pytestmark = [pytest.mark.vllm, MOVING_IN_EACH_DTYPE]

SECONDS = STALL_SECONDS / 2


def test_who_only_waits_rests(pair: Pair, report: Report) -> None:
    """But for the two processes of vLLM, which spin for each other's messages. In one process nothing of it spins."""
    assert pair.a.keyring is not None
    movers = Movers(pair.a, pair.b, Keyring.load(pair.a.keyring))
    prompt = movers.prompt(SHORT)
    movers.cold(prompt, output_tokens=1)
    own = movers.cold(prompt)
    plan = movers.plan(prompt)
    everybody = family(pair.b.process.pid)
    idle = Used.by(everybody)
    ask(pair.b.http, movers.body(movers.prompt(SHORT), output_tokens=1))
    computing = Used.by(everybody).since(idle)
    with link_to(plan.addresses[0]) as link, ThreadPoolExecutor(1) as threads:
        held_at = link.hold_at = movers.bytes_of(HELD) // 2
        pulling = threads.submit(movers.pull, prompt, plan._replace(addresses=(link.address,)))
        eventually(lambda: link.sent > held_at - 8192, "it has begun", 60.0)
        before, began = Used.by(everybody), time.monotonic()
        time.sleep(SECONDS)
        waiting, seconds = Used.by(everybody).since(before), time.monotonic() - began
        assert info(pair.b)["counts"]["loading"] == 1
        link.let_pass()
        assert (pulling.result().tokens, pulling.result().cached_tokens) == (own.tokens, HELD)
    shares = Used(*(used / seconds for used in waiting))
    report(f"shares of a core while a request waited for its pull, the engine in {pair.b.processes}: {shares}")
    assert shares.beside < 0.05
    assert shares.worker < 0.2
    if pair.b.processes == "one":
        assert shares.everybody < 0.2
    # What is used would be seen.
    assert computing.worker > 2 * waiting.worker
