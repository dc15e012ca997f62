"""A source that gives away what is being pulled from it, over and over."""

import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from cachecore.scope import Keyring, Naming
from cachecore.transfer.errors import Reason
from cachecore.transfer.plan import Plan
from cachecore.transfer.transport import Fetched
from tests.gateway.end_to_end.processes import eventually
from tests.vllm.conftest import MOVING, Pair, Report
from tests.vllm.movers import Movers
from tests.vllm.peers import Came, Peer
from tests.vllm.servers import BLOCK_TOKENS

pytestmark = [pytest.mark.vllm, MOVING]

BLOCKS = 2
"""Of a prompt's, that are whole; its last token begins a third."""
TIMES = 200
EDGE = 3


class Run(NamedTuple):
    plan: Plan
    kv: Tensor
    """As it was when it had just been computed."""


class Puller:
    """Pulls the oldest runs, again and again, until they are gone."""

    def __init__(self, peer: Peer, naming: Naming) -> None:
        self._peer = peer
        self._naming = naming
        self._runs: deque[Run] = deque()
        self.pulls = 0
        self.gone: Counter[Reason] = Counter()
        """Runs, by why they were refused in the end."""
        self.wrong: list[Came] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._pull)

    def __enter__(self) -> "Puller":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def add(self, run: Run) -> None:
        self._runs.append(run)

    def _pull(self) -> None:
        while not self._stopping.is_set():
            oldest: Sequence[Run] = list(self._runs)[:EDGE]
            for run in oldest:
                came = self._peer.pull(run.plan, self._naming)
                self.pulls += 1
                if isinstance(came.outcome, Fetched):
                    if not torch.equal(came.kv, run.kv):
                        self.wrong.append(came)
                else:
                    self.gone[came.outcome.reason] += 1
                    self._runs.remove(run)
            if not oldest:
                self._stopping.wait(0.01)


def test_what_is_given_away_while_it_is_pulled_comes_right_or_not_at_all(pair: Pair, report: Report) -> None:
    """Every prompt takes the blocks of the one that is oldest, while that one is pulled without a pause."""
    assert pair.a.keyring is not None
    keyring = Keyring.load(pair.a.keyring)
    movers = Movers(pair.a, pair.b, keyring)
    naming = movers.naming()
    with (
        Peer(pair.a, keyring).running() as pulling,
        Peer(pair.a, keyring).running() as quiet,
        Puller(pulling, naming) as puller,
    ):
        for _ in range(TIMES + pair.a.blocks // BLOCKS):
            prompt = movers.prompt(BLOCKS * BLOCK_TOKENS + 1)
            body = movers.body(prompt, output_tokens=1, stream=False)
            del body["stream_options"]
            pair.a.post(body, "/v1/completions").raise_for_status()
            plan = movers.plan(prompt)
            came = quiet.pull(plan, naming)
            assert came.fetched, came.outcome
            puller.add(Run(plan, came.kv))
        eventually(lambda: puller.gone.total() >= TIMES, f"{TIMES} prompts have made room", 120.0)
    gone = {reason.value: count for reason, count in puller.gone.items()}
    report(f"{puller.pulls} pulls of runs that were about to make room, which came right, or were gone: {gone}")
    assert not puller.wrong
    assert puller.pulls > puller.gone.total()
    assert set(puller.gone) <= {Reason.STALE, Reason.CLOSED, Reason.INCOMPLETE}
