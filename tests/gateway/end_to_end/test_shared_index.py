"""Gateways with one index in a real Valkey: what one is told all know, and none of it is lost, invented or resurrected.

The proof each time is the workers' own lists of their blocks (`sharing.Prover`). The workers are small: a few dozen
prompts and they evict.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from cachecore.scope import Keyring
from tests.cachecore.store.servers import Server, start_server
from tests.gateway.end_to_end.processes import (
    MODEL,
    REPOSITORY,
    Fleet,
    Gateway,
    cached_tokens,
    candidate,
    chat,
    eventually,
    free_ports,
    full_hit,
    matched_tokens,
    new_keyring,
    token_count,
    whole_blocks,
    worker_of,
)
from tests.gateway.end_to_end.sharing import Member, SharingStack, sharing_config

pytestmark = pytest.mark.stacks

FLAGS = ("--speed", "50", "--blocks", "320")
PROMPT_CHARACTERS = 480
FILLING = 60
"""Prompts that together are half as much again as the workers can hold."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharing")


@pytest.fixture(scope="module")
def keyring(folder: Path) -> Path:
    return new_keyring(folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with start_server(folder) as server:
        yield server


@pytest.fixture(scope="module")
def fleets(folder: Path) -> Iterator[list[Fleet]]:
    """Three workers in one process, and one that can be killed alone."""
    fleets = [Fleet(folder, *FLAGS, count=count) for count in (3, 1)]
    yield fleets
    for fleet in fleets:
        fleet.stop()


@pytest.fixture(scope="module")
def shared(folder: Path, server: Server, keyring: Path, fleets: list[Fleet]) -> Iterator[SharingStack]:
    with SharingStack(folder, server, keyring, fleets) as stack:
        stack.fleets = fleets  # a worker that one test begins again is the next one's, too
        yield stack


@pytest.fixture
def stack(shared: SharingStack) -> SharingStack:
    shared.restart_dead_gateways()
    shared.wait_settled()
    return shared


def fresh(random: Random) -> dict[str, Any]:
    return chat("".join(random.choice("abcdefghij klmno") for _ in range(PROMPT_CHARACTERS)), max_tokens=2)


def fill(gateways: Sequence[Gateway], seed: int, count: int = FILLING) -> list[dict[str, Any]]:
    """Send new prompts to each gateway in turn. Returns them."""
    random = Random(seed)
    bodies = [fresh(random) for _ in range(count)]
    for number, body in enumerate(bodies):
        answer = gateways[number % len(gateways)].post(body)
        assert answer.status_code == 200, answer.text
    return bodies


def held_at(gateway: Gateway, worker: str, bodies: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those of the prompts of which the gateway confirms every block at the worker."""
    return [body for body in bodies if candidate(gateway.explain(body), worker)["confirmed_tokens"] == full_hit(body)]


# What one knows all know


def test_every_turn_hits_whichever_gateway_it_is_sent_to(stack: SharingStack) -> None:
    messages: list[dict[str, Any]] = []
    held = 0
    workers: set[str] = set()
    for turn, question in enumerate(("Tell me of the sea. " * 8, "And of its tides?", "Which is higher?", "Why?")):
        gateway = stack.gateways[turn % 2]
        messages.append({"role": "user", "content": question})
        body = {"model": MODEL, "messages": messages, "max_tokens": 40}
        if turn:
            gateway.wait_confirmed(body, min(workers), held)
        answer = gateway.post(body)
        assert matched_tokens(answer) == cached_tokens(answer) == held
        workers.add(worker_of(answer))
        messages.append(answer.json()["choices"][0]["message"])
        held = whole_blocks(token_count(body["messages"][:-1]) + 40 - 1)
    assert held > 160
    assert len(workers) == 1


def test_each_worker_is_followed_once_and_seen_by_all(stack: SharingStack) -> None:
    bodies = fill(stack.gateways, seed=1, count=8)
    stack.wait_exact(bodies)
    assert set(stack.prover.copy.owners()) == set(stack.workers)
    followed = [event for gateway in stack.gateways for w in gateway.status()["workers"] for event in w["events"]]
    assert len(followed) == len(stack.workers)


def test_evictions_are_seen_by_all(stack: SharingStack) -> None:
    bodies = fill(stack.gateways, seed=2)
    held = sum(len(stack.prover.list_of(worker).copies) for worker in stack.workers)
    assert held < sum(len(stack.prover.names(body)) for body in bodies)
    stack.wait_exact(bodies)


def test_what_one_gateway_has_sent_is_load_to_the_other(stack: SharingStack) -> None:
    sender, other = stack.gateways
    late = {"x-simulate": '{"delay_first_ms": 1500}'}
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(sender.post, chat("An answer that is long in coming"), late)
        eventually(lambda: any(inflight(other).values()), "the other gateway counts it")
        loads = inflight(other)
        assert loads == inflight(sender)
        worker = worker_of(answer.result())
    assert {name for name, count in loads.items() if count} == {worker}
    eventually(lambda: not any(inflight(other).values()), "and sees it end")


def inflight(gateway: Gateway) -> dict[str, int]:
    return {worker["name"]: worker["inflight"] for worker in gateway.status()["workers"]}


# A gateway ends


@pytest.mark.parametrize("end", [Member.stop, Member.kill], ids=["stopped", "killed"])
def test_another_gateway_goes_on_where_one_ended(stack: SharingStack, end: Callable[[Member], None]) -> None:
    owner = stack.owner_of(stack.workers[0])
    heir = stack.other(owner)
    bodies = fill(stack.gateways, seed=3)
    end(owner)
    # Evictions that nobody follows as they come.
    bodies += fill([heir], seed=4, count=FILLING // 2)
    stack.prover.wait_exact([heir], stack.workers, bodies)
    assert any(held_at(heir, worker, bodies) for worker in stack.workers)
    assert set(stack.prover.copy.owners().values()) == {heir.member}

    again = stack.restart_gateway(owner)
    stack.prover.wait_exact([again], stack.workers, bodies)
    bodies = fill(stack.gateways, seed=5)
    stack.wait_exact(bodies)


# A worker ends


def test_a_life_that_has_ended_is_matched_nowhere(stack: SharingStack) -> None:
    fleet = stack.fleets[1]
    (victim,) = fleet.names
    random = Random(7)
    bodies = [body for body in (fresh(random) for _ in range(40)) if worker_of(stack.gateways[0].post(body)) == victim]
    body = bodies[-1]
    for gateway in stack.gateways:
        gateway.wait_confirmed(body, victim, full_hit(body))
    epoch = stack.gateways[0].worker(victim)["epoch"]
    fleet.kill()
    stack.restart_fleet(fleet, *FLAGS)

    def reborn(gateway: Gateway) -> bool:
        known = gateway.worker(victim)["epoch"] > epoch
        # Between its new epoch and its first clean probe it is no candidate.
        candidates = {entry["worker"]: entry for entry in gateway.explain(body)["candidates"]}
        assert not known or victim not in candidates or candidates[victim]["confirmed_tokens"] == 0
        return known and victim in candidates

    for gateway in stack.gateways:
        eventually(lambda gateway=gateway: reborn(gateway), "the new life is noticed")
    for _ in range(20):  # what was under way when the old life ended comes too late
        for gateway in stack.gateways:
            assert candidate(gateway.explain(body), victim)["confirmed_tokens"] == 0
    bodies = fill(stack.gateways, seed=8)
    stack.wait_exact(bodies)
    lives = [holder.epoch for holder in stack.prover.copy.records() if holder.name == victim]
    assert lives == [stack.gateways[0].worker(victim)["epoch"]]


# The server fails


def test_an_emptied_server_is_told_again(stack: SharingStack) -> None:
    bodies = fill(stack.gateways, seed=9)
    stack.wait_exact(bodies)
    stack.server.command("FLUSHALL")
    bodies += fill(stack.gateways, seed=10, count=10)
    stack.wait_exact(bodies)


def test_a_key_that_was_lost_is_written_again(stack: SharingStack) -> None:
    bodies = fill(stack.gateways, seed=15)
    stack.wait_exact(bodies)
    lost = stack.server.command("KEYS", "ropeway:*:runs:*")[0]
    stack.server.command("DEL", lost)
    assert stack.prover.differences(stack.gateways, stack.workers)
    bodies += fill(stack.gateways, seed=16, count=20)
    stack.wait_exact(bodies)


def test_an_heir_does_not_go_on_from_what_the_server_has_lost(stack: SharingStack) -> None:
    """Keys can be evicted when nobody writes them any more, who would notice."""
    owner = stack.owner_of(stack.workers[0])
    heir = stack.other(owner)
    bodies = fill(stack.gateways, seed=17)
    stack.wait_exact(bodies)
    owner.kill()
    orphans = {worker for worker, member in stack.prover.copy.owners().items() if member == owner.member}
    for holder in stack.prover.copy.records():
        if holder.name in orphans:
            assert stack.server.command("DEL", stack.prover.copy.schema.runs(holder, b"a")) == 1
    bodies += fill([heir], seed=18, count=20)
    stack.prover.wait_exact([heir], stack.workers, bodies)


def test_a_server_that_comes_late_and_goes_for_good(tmp_path: Path, keyring: Path, fleets: list[Fleet]) -> None:
    with start_server(tmp_path) as server:
        server.kill()
        with SharingStack(tmp_path, server, keyring, fleets) as stack:
            bodies = fill(stack.gateways, seed=11, count=12)
            server.restart()
            bodies += fill(stack.gateways, seed=12, count=12)
            stack.wait_settled()
            stack.wait_exact(bodies)

            server.kill()
            fill(stack.gateways, seed=14, count=12)
            eventually(lambda: both_hear(stack.gateways), "each follows every stream itself", 15.0)


def test_a_gateway_without_a_mirror_asks_the_server_and_does_without_it(
    tmp_path: Path, keyring: Path, fleets: list[Fleet]
) -> None:
    with (
        start_server(tmp_path) as server,
        SharingStack(tmp_path, server, keyring, fleets, members=("d",), lookups="redis") as stack,
    ):
        (gateway,) = stack.gateways
        body = fresh(Random(21))
        worker = worker_of(gateway.post(body))
        gateway.wait_confirmed(body, worker, full_hit(body))
        assert gateway.status()["sharing"]["mirror"] is None
        answer = gateway.post(body)
        assert (worker_of(answer), matched_tokens(answer)) == (worker, full_hit(body))
        server.freeze()
        answers = [gateway.post(body) for _ in range(8)]
        assert [answer.status_code for answer in answers] == [200] * 8
        assert {matched_tokens(answer) for answer in answers} == {0}
        server.thaw()
        gateway.wait_confirmed(body, worker, full_hit(body))


def both_hear(gateways: Sequence[Gateway]) -> bool:
    """Of a new prompt that one of them is sent."""
    body = fresh(Random(time.monotonic_ns()))
    worker = worker_of(gateways[0].post(body))
    time.sleep(0.1)
    return all(held_at(gateway, worker, [body]) for gateway in gateways)


# Keyrings


def run_gateway(directory: Path, config: Mapping[str, Any]) -> tuple[int, str]:
    """What a gateway that does not start says."""
    path = directory / "refused.yaml"
    path.write_text(yaml.safe_dump({"port": free_ports(1)[0], **config}))
    command = [sys.executable, "-m", "ropeway", "serve", "-c", str(path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=15, check=False)
    return done.returncode, done.stderr


def test_without_a_keyring_no_gateway_shares(tmp_path: Path, server: Server) -> None:
    status, said = run_gateway(tmp_path, {"redis": server.url})
    assert status != 0
    assert "keyring: gateways that share an index must name blocks alike" in said
    assert "Traceback" not in said


def test_a_gateway_with_another_keyring_is_refused(tmp_path: Path, stack: SharingStack) -> None:
    other = tmp_path / "other.json"
    Keyring.generate().save(other)
    status, said = run_gateway(tmp_path, sharing_config(stack.server.url, other, "stranger"))
    assert status != 0
    assert "keyring" in said
    assert "Traceback" not in said
