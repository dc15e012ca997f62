"""KV moves between two vLLM instances through the connector, and no text becomes another by it."""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from cachecore.scope import Keyring
from tests.gateway.end_to_end.processes import Gateway, eventually
from tests.vllm.conftest import MOVING, STEP_TOKENS, Pair, Report
from tests.vllm.family import Used, family
from tests.vllm.movers import BYTES_PER_TOKEN, RIVAL, Answer, Movers, ask, ask_whole, asked_in_vain
from tests.vllm.servers import BLOCK_TOKENS, MODEL
from tests.workers.contract.lab import replayed
from tests.workers.following import Follower
from tests.workers.transfer.world import Link

pytestmark = [pytest.mark.vllm, MOVING]

SHORT = 10 * BLOCK_TOKENS + 7
"""Tokens of a prompt for what need not be long: two seconds of computing."""
HELD = 10 * BLOCK_TOKENS
LONG = 1900
LONG_HELD = LONG // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.fixture
def movers(pair: Pair) -> Movers:
    assert pair.a.keyring is not None
    return Movers(pair.a, pair.b, Keyring.load(pair.a.keyring))


class LoopedLink(Link):
    """One on a loop of its own."""

    def __init__(self, address: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(address)
        self._loop = loop
        self._writers: list[asyncio.StreamWriter] = []

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        await super()._accept(reader, writer)

    def abort(self) -> None:
        """What a puller that has died has not read will never be."""
        for writer in self._writers:
            writer.transport.abort()

    def let_pass(self) -> None:
        self._loop.call_soon_threadsafe(self.opened.set)


@contextmanager
def link_to(address: str) -> Iterator[LoopedLink]:
    """A proxy in front of a source."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    link = LoopedLink(address, loop)
    opened = link.open()
    try:
        asyncio.run_coroutine_threadsafe(opened.__aenter__(), loop).result(10)
        try:
            yield link
        finally:
            link.let_pass()
            asyncio.run_coroutine_threadsafe(opened.__aexit__(None, None, None), loop).result(10)
            loop.call_soon_threadsafe(link.abort)
            # Sockets close in the turns that follow.
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def followed(replay_endpoint: str) -> Follower:
    """What events so far amount to."""
    follower = Follower()
    for _, payload in asyncio.run(replayed(replay_endpoint)):
        follower.take(payload)
    return follower


def announced(movers: Movers, prompt: Sequence[int]) -> int:
    """Blocks of a prompt that the target has said to hold."""
    prefixes = [tokens for _, _, tokens in followed(movers.target.replay_endpoint).held()]
    return sum(tokens == tuple(prompt[: len(tokens)]) for tokens in prefixes)


# ---- what is pulled --------------------------------------------------------------------------------------------------


def test_a_long_prefix_is_pulled_and_the_text_is_that_of_computing(movers: Movers, report: Report) -> None:
    """And a tenth of the work before its first token: of the time, too, where nobody else takes it."""
    prompt, everybody = movers.prompt(LONG), family(movers.target.process.pid)
    cold = movers.cold(prompt, output_tokens=64)
    used = [Used.by(everybody)]
    other = ask(movers.target.http, movers.body(movers.prompt(LONG), output_tokens=1))
    used.append(Used.by(everybody))
    pulled = movers.pull(prompt, movers.plan(prompt), output_tokens=64)
    used.append(Used.by(everybody))
    again = ask(movers.target.http, movers.body(prompt, output_tokens=64))
    used.append(Used.by(everybody))
    assert (cold.cached_tokens, other.cached_tokens, pulled.cached_tokens) == (0, 0, LONG_HELD)
    assert (again.cached_tokens, again.tokens) == (LONG_HELD, cold.tokens)
    assert pulled.report.startswith(f"outcome=fetched; tokens={LONG_HELD}; bytes={LONG_HELD * BYTES_PER_TOKEN};")
    assert pulled.tokens == cold.tokens
    assert len(pulled.tokens) == 64
    computing, pulling, answering = (later.since(earlier).worker for earlier, later in pairwise(used))
    report(
        f"first token of {LONG} tokens: {cold.ttft_seconds:.2f} s at the source and {other.ttft_seconds:.2f} s at the "
        f"target computed, {pulled.ttft_seconds:.2f} s pulled, {again.ttft_seconds:.2f} s held; processor time of "
        f"computing it {computing:.2f} s, of pulling it {pulling - answering:.2f} s"
    )
    assert computing > 10 * (pulling - answering)


@pytest.mark.parametrize("tokens", [BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 4 * BLOCK_TOKENS])
def test_prompts_that_end_near_the_edge_of_a_block(movers: Movers, tokens: int) -> None:
    prompt = movers.prompt(tokens)
    cold = movers.cold(prompt)
    blocks = tokens // BLOCK_TOKENS
    pulled = movers.pull(prompt, *([movers.plan(prompt)] if blocks else []))
    assert pulled.tokens == cold.tokens
    assert pulled.cached_tokens in (blocks * BLOCK_TOKENS, (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS)


def test_part_of_a_prompt_is_pulled_behind_what_is_there(movers: Movers) -> None:
    prompt = movers.prompt(SHORT)
    ask(movers.target.http, movers.body(prompt[: 4 * BLOCK_TOKENS + 1]))
    cold = movers.cold(prompt)
    pulled = movers.pull(prompt, movers.plan(prompt, first=4))
    assert pulled.tokens == cold.tokens
    assert pulled.cached_tokens == HELD
    again = movers.pull(prompt, movers.plan(prompt))
    assert (again.tokens, again.cached_tokens) == (cold.tokens, HELD)


def test_a_rest_that_is_computed_in_chunks(movers: Movers) -> None:
    prompt = movers.prompt(STEP_TOKENS + 5 * BLOCK_TOKENS)
    cold = movers.cold(prompt)
    pulled = movers.pull(prompt, movers.plan(prompt, end=2))
    assert (pulled.tokens, pulled.cached_tokens) == (cold.tokens, 2 * BLOCK_TOKENS)


def test_what_was_generated_is_served_as_well(movers: Movers) -> None:
    prompt = movers.prompt(BLOCK_TOKENS)
    said = movers.cold(prompt, output_tokens=BLOCK_TOKENS + 1)
    longer = [*prompt, *said.tokens]
    cold = movers.cold(longer)
    pulled = movers.pull(longer, movers.plan(longer))
    assert pulled.tokens == cold.tokens
    assert pulled.cached_tokens == 2 * BLOCK_TOKENS


def test_eight_at_once_share_one_transfer(movers: Movers) -> None:
    prompt = movers.prompt(SHORT)
    cold = movers.cold(prompt)
    plan = movers.plan(prompt)
    with link_to(plan.addresses[0]) as link, ThreadPoolExecutor(8) as threads:
        plan = plan._replace(addresses=(link.address,))
        answers = list(threads.map(lambda _: movers.pull(prompt, plan), range(8)))
        assert [answer.tokens for answer in answers] == [cold.tokens] * 8
        assert {answer.cached_tokens for answer in answers} == {HELD}
        assert sum(answer.report.startswith(f"outcome=fetched; tokens={HELD};") for answer in answers) == 1
        assert sum(answer.report.startswith("outcome=held;") for answer in answers) == 7
        assert link.sent < 1.5 * HELD * BYTES_PER_TOKEN


# ---- what is announced -----------------------------------------------------------------------------------------------


def test_blocks_are_announced_once_they_are_there(movers: Movers) -> None:
    prompt = movers.prompt(SHORT)
    cold = movers.cold(prompt)
    plan = movers.plan(prompt)
    with link_to(plan.addresses[0]) as link, ThreadPoolExecutor(1) as threads:
        link.hold_at = HELD * BYTES_PER_TOKEN // 2
        pulling = threads.submit(movers.pull, prompt, plan._replace(addresses=(link.address,)))
        eventually(lambda: link.sent > 0, "it has begun")
        assert announced(movers, prompt) == 0
        link.let_pass()
        assert pulling.result().tokens == cold.tokens
    eventually(lambda: announced(movers, prompt) == HELD // BLOCK_TOKENS, "the blocks are announced")


# ---- what goes wrong -------------------------------------------------------------------------------------------------

Damage = Callable[[Link], Any]


def _set(**changes: int) -> Damage:
    def damage(link: Link) -> None:
        for name, value in changes.items():
            setattr(link, name, value)

    return damage


DAMAGES: dict[str, Damage] = {
    "ends at once": _set(cut_at=0),
    "ends in the header": _set(cut_at=100),
    "ends in the middle": _set(cut_at=HELD * BYTES_PER_TOKEN // 2),
    "ends before its last byte": _set(cut_at=HELD * BYTES_PER_TOKEN),
    "stalls at once": _set(hold_at=0),
    "stalls in the middle": _set(hold_at=HELD * BYTES_PER_TOKEN // 2),
    "a bit of the header": _set(flip_at=60),
    "a bit of the payload": _set(flip_at=HELD * BYTES_PER_TOKEN // 3),
    "a bit of the end": _set(flip_at=HELD * BYTES_PER_TOKEN - 5),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_what_does_not_come_right_is_computed(movers: Movers, damage: Damage) -> None:
    prompt = movers.prompt(SHORT)
    cold = movers.cold(prompt)
    plan = movers.plan(prompt)
    with link_to(plan.addresses[0]) as link:
        damage(link)
        pulled = movers.pull(prompt, plan._replace(addresses=(link.address,)))
    assert pulled.tokens == cold.tokens
    assert pulled.cached_tokens == 0
    assert pulled.report.startswith("outcome=failed; reason=")
    assert announced(movers, prompt) == HELD // BLOCK_TOKENS


def test_a_source_that_is_not_there_costs_its_plan(movers: Movers) -> None:
    prompt = movers.prompt(SHORT)
    cold = movers.cold(prompt)
    pulled = movers.pull(prompt, movers.plan(prompt, addresses=("tcp://127.0.0.1:9",)))
    assert (pulled.tokens, pulled.cached_tokens) == (cold.tokens, 0)


@pytest.mark.parametrize("forgery", ["another keyring", "another address", "another prompt", "another target"])
def test_nobody_pulls_by_a_word_that_is_not_the_gateways(movers: Movers, forgery: str) -> None:
    prompt = movers.prompt(SHORT)
    cold = movers.cold(prompt)
    plan = movers.plan(prompt)
    documents = {
        "another keyring": movers.signed(plan, keyring=Keyring.generate()),
        "another address": {**movers.signed(plan), "addresses": ["tcp://127.0.0.1:9"]},
        "another prompt": movers.signed(movers.plan(movers.prompt(SHORT))),
        "another target": movers.signed(plan, target=movers.source),
    }
    answer = ask(movers.target.http, movers.body(prompt, documents[forgery]))
    assert (answer.tokens, answer.cached_tokens) == (cold.tokens, 0)
    assert answer.report.startswith("outcome=refused; reason=")


def test_tenants_are_kept_apart(movers: Movers) -> None:
    prompt = movers.prompt(SHORT)
    cold = movers.cold(prompt)
    rival = movers.pull(prompt, movers.plan(prompt), cache_salt=movers.salt(RIVAL))
    assert (rival.tokens, rival.cached_tokens) == (cold.tokens, 0)
    own = movers.pull(prompt, movers.plan(prompt))
    assert (own.tokens, own.cached_tokens) == (cold.tokens, HELD)


def test_whatever_a_client_writes_the_engine_lives(movers: Movers) -> None:
    prompt = movers.prompt(40)
    plan = dict(movers.signed(movers.plan(prompt)))
    documents: list[Any] = [
        *("text", ["x"], [None], [{}], [[[[]]]], {"a": 1}, 5, None, [{"version": 1}], ["a" * 10] * 100_000),
        *([{**plan, key: value}] for key in plan for value in (2**70, -1, "x", None, [], {"a": []}, math.pi)),
    ]
    for document in documents:
        body = movers.body(prompt, output_tokens=1, stream=False, kv_transfer_params={"ropeway": document})
        del body["stream_options"]
        answer = movers.target.http.post("/v1/completions", json=body)
        assert answer.status_code < 500, (document, answer.text)
    assert movers.target.http.get("/health").status_code == 200


def test_a_client_that_leaves_during_a_load_leaves_nothing(movers: Movers) -> None:
    prompt = movers.prompt(SHORT)
    cold = movers.cold(prompt)
    plan = movers.plan(prompt)
    with link_to(plan.addresses[0]) as link:
        link.hold_at = HELD * BYTES_PER_TOKEN // 2
        document = movers.signed(plan._replace(addresses=(link.address,)))
        with asked_in_vain(movers.target.http, movers.body(prompt, document)):
            eventually(lambda: link.sent > 0, "it has begun")
    movers.target.wait_idle()
    assert announced(movers, prompt) == 0
    again = movers.pull(prompt, plan)
    assert (again.tokens, again.cached_tokens) == (cold.tokens, HELD)


def test_a_client_that_leaves_while_it_is_answered(movers: Movers) -> None:
    prompt = movers.prompt(SHORT)
    cold = movers.cold(prompt)
    body = movers.body(prompt, movers.signed(movers.plan(prompt)), output_tokens=200)
    with movers.target.http.stream("POST", "/v1/completions", json=body) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
    movers.target.wait_idle()
    again = ask(movers.target.http, movers.body(prompt))
    assert (again.tokens, again.cached_tokens) == (cold.tokens, HELD)


def test_others_go_on_while_a_pull_stalls(movers: Movers) -> None:
    prompt = movers.prompt(SHORT)
    cold = movers.cold(prompt)
    plan = movers.plan(prompt)
    with link_to(plan.addresses[0]) as link, ThreadPoolExecutor(1) as threads:
        link.hold_at = 0
        pulling = threads.submit(movers.pull, prompt, plan._replace(addresses=(link.address,)))
        eventually(lambda: link.connections > 0, "it has begun")
        other: Answer = ask(movers.target.http, movers.body(movers.prompt(8), output_tokens=1))
        assert len(other.tokens) == 1
        assert pulling.result().tokens == cold.tokens


def test_blocks_that_make_room_while_they_are_pulled(movers: Movers) -> None:
    """The source computes prompts that push out what is being read: what comes is right, or computed."""
    for _ in range(4):
        prompt = movers.prompt(SHORT)
        cold = movers.cold(prompt)
        plan = movers.plan(prompt)
        churn = [threading.Thread(target=movers.cold, args=(movers.prompt(900),)) for _ in range(3)]
        for thread in churn:
            thread.start()
        time.sleep(1.0)
        pulled = movers.pull(prompt, plan)
        for thread in churn:
            thread.join()
        assert pulled.tokens == cold.tokens
        assert pulled.cached_tokens in (0, HELD)


# ---- through the gateway ---------------------------------------------------------------------------------------------


@pytest.fixture
def gateway(pair: Pair, model: Path, tmp_path: Path) -> Iterator[Gateway]:
    workers = [{"url": server.url, "sidecar": server.sidecar} for server in pair]
    config = {
        "keyring": str(pair.a.keyring),
        "tokenizers": {MODEL: str(model)},
        "policy_header_allowed": True,
        "transfer": {"codecs": ["raw"], "fidelity": "exact", "deadline_seconds_min": 20.0},
        "workers": workers,
    }
    gateway = Gateway(tmp_path, [server.url for server in pair], config)
    gateway.http.timeout = httpx.Timeout(300)
    with gateway:
        yield gateway


Asker = Callable[..., Answer]


@pytest.mark.parametrize("asked", [ask, ask_whole])
def test_the_gateway_has_the_other_one_pull(gateway: Gateway, movers: Movers, asked: Asker) -> None:
    """And hears from it what came."""
    prompt = movers.prompt(SHORT)
    body = movers.body(prompt)
    del body["cache_salt"]
    cold = asked(gateway.http, body)
    first = gateway.status()["receipts"][0]["worker"]

    def elsewhere() -> dict[str, str] | None:
        """A session of the other worker, once it is known what the warm one has."""
        for number in range(50):
            session = {"x-ropeway-policy": "session", "x-ropeway-session": str(number)}
            told = gateway.explain(body, session)
            if told["pull"]:
                return session
        return None

    pulled = asked(gateway.http, body, eventually(elsewhere, "the other one could pull", 60.0))
    assert (cold.cached_tokens, pulled.cached_tokens) == (0, HELD)
    assert pulled.tokens == cold.tokens
    receipt, *_ = gateway.status()["receipts"]
    assert receipt["worker"] != first
    assert receipt["reported_cached_tokens"] == HELD
    assert (receipt["pull"]["outcome"], receipt["pull"]["pulled_tokens"]) == ("fetched", HELD)
    assert receipt["pull"]["pulled_bytes"] == HELD * BYTES_PER_TOKEN


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_a_source_that_dies_in_a_transfer_costs_its_plan(movers: Movers) -> None:
    prompt = movers.prompt(3 * SHORT)  # more than sockets hold
    cold = movers.cold(prompt)
    plan = movers.plan(prompt)
    with link_to(plan.addresses[0]) as link, ThreadPoolExecutor(1) as threads:
        link.hold_at = HELD * BYTES_PER_TOKEN // 8
        pulling = threads.submit(movers.pull, prompt, plan._replace(addresses=(link.address,)))
        eventually(lambda: link.sent > 0, "it has begun")
        movers.source.kill()
        link.let_pass()
        assert pulling.result().tokens == cold.tokens
    assert pulling.result().cached_tokens == 0
    assert movers.target.http.get("/health").status_code == 200
    again = ask(movers.target.http, movers.body(prompt))
    assert (again.tokens, again.cached_tokens) == (cold.tokens, len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS)
    movers.source.start()
    movers.source.wait_ready()
