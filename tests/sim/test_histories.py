"""A slice of the histories, and that they can see: a sabotaged gateway must be caught."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gateway.edge.contract import Ending
from gateway.edge.exchange import Exchange
from gateway.edge.upstream import UpstreamConnection
from gateway.journey import Journey
from policies.state.inflight import InflightAccounting
from tests.sim.run import repeat
from tests.sim.verdict import judge
from tests.sim.world import play

SLICE = 120
DIGESTS = 6
ROOT = Path(__file__).resolve().parents[2]


def test_every_request_ends_as_the_contract_says() -> None:
    ends: Counter[str] = Counter()
    for seed in range(SLICE):
        world = play(seed)
        assert judge(world) == [], repeat(seed)
        ends.update(ending for ending, _ in world.metrics.endings)
        ends.update(f"ended {status}" for _, status in world.metrics.endings)
        ends.update(f"refused {status}" for status in world.metrics.refusals)
        ends.update(world.metrics.retries)
    # And there were such requests.
    wanted = {*Ending} | {"connection_lost", "connection_stale", "connect_refused", "worker_busy"}
    wanted |= {f"ended {status}" for status in (200, 422, 429, 502, 503, 504)} | {"refused 400"}
    assert wanted <= ends.keys(), wanted - ends.keys()


def test_one_seed_is_one_history() -> None:
    """In another process, too, where strings hash otherwise and objects lie elsewhere."""
    code = f"from tests.sim.world import play; print(*[play(seed).digest() for seed in range({DIGESTS})])"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=True)
    here = [play(seed).digest() for seed in range(DIGESTS)]
    assert told.stdout.decode().split() == here
    assert len(set(here)) == DIGESTS


# Sabotage: what a careless change would do


def _forged_end(exchange: Any, failure: Any, connection: Any) -> None:
    exchange._client.write(b"0\r\n\r\n")
    exchange._end(Ending.UPSTREAM_BROKE)
    exchange._client.answer_complete(True)


def _forgetful_finish(accounting: Any, *_: Any) -> None:
    """Nothing is taken off the accounts."""


def _lingering_drop(exchange: Any) -> None:
    """The worker goes on for a client that has left."""
    exchange._connection = None


def _twice(journey: Any, failure: Any) -> bool:
    """Any failure is a reason to try again."""
    return bool(journey._goes_elsewhere())


def _impatient(exchange: Any, now: float) -> None:
    """A worker may be silent for ever."""


def _leaky_abort(connection: Any) -> None:
    connection._receiver = None


SABOTAGE: dict[str, tuple[type, str, Any]] = {
    "an answer that broke off ends as if it were whole": (Exchange, "_broke_midway", _forged_end),
    "accounts are not settled": (InflightAccounting, "finish", _forgetful_finish),
    "the worker is not told that the client has left": (Exchange, "_drop_attempt", _lingering_drop),
    "silence is not noticed": (Exchange, "check", _impatient),
    "connections are left open": (UpstreamConnection, "abort", _leaky_abort),
    "an attempt is made whatever went wrong": (Journey, "failed", _twice),
}


@pytest.mark.parametrize("what", SABOTAGE)
def test_sabotage_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, replacement = SABOTAGE[what]
    assert name in vars(owner)
    monkeypatch.setattr(owner, name, replacement)
    assert any(judge(play(seed)) for seed in range(SLICE)), what
