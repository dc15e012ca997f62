"""Two simulated workers and plans as a gateway writes them, over real sockets."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from cachecore.blocks import PrefixHash, pack_tokens, split_chain
from cachecore.events import BlockStored, decode_batch
from cachecore.index.schema import parse_holder
from cachecore.prompts.plain import PlainRenderer
from cachecore.scope import (
    DEFAULT_TENANT,
    Fidelity,
    IdentityScope,
    Keyring,
    Naming,
    Salt,
    TenantId,
    stated_fidelity,
)
from cachecore.transfer.capability import Run
from cachecore.transfer.plan import PARAMETER, Grant, Plan, sign
from tests.cachecore.transfer.certificates import Authority
from workers.publisher import END_OF_REPLAY
from workers.simulated.engine import SimulatedConfig
from workers.simulated.fleet import SimulatedWorker
from workers.simulated.link import LinkConfig, Uplink

BLOCK = 16
TEXT = "a cable car goes up the mountain " * 40
TOKENS = list(TEXT.encode())
BLOCKS = len(TOKENS) // BLOCK
LINK = LinkConfig(100.0)


@dataclass
class Pair:
    """Worker a has the prompt, worker b may pull it."""

    keyring: Keyring
    a: SimulatedWorker
    b: SimulatedWorker
    http: httpx.AsyncClient

    @property
    def naming(self) -> Naming:
        key_id = self.keyring.key_id(DEFAULT_TENANT)
        return Naming.of(IdentityScope("simulated", key_id, BLOCK, tokenizer=PlainRenderer.fingerprint), self.keyring)

    @property
    def names(self) -> list[PrefixHash]:
        """The root, then the prompt's blocks."""
        naming = self.naming
        return [naming.root, *split_chain(naming.hasher.chain(naming.root, pack_tokens(TOKENS)))]

    def salt(self, **fields: Any) -> str:
        return self.keyring.mint_salt(Salt(self.keyring.key_id(DEFAULT_TENANT), **fields))

    async def info(self, worker: SimulatedWorker) -> dict[str, Any]:
        return (await self.http.get(f"{worker.url}/server_info")).json()["transfer"]

    async def plan(
        self, first: int = 0, end: int = BLOCKS, codec: str = "i8", deadline: float = 5.0, **grant: Any
    ) -> dict[str, Any]:
        source, target = await self.info(self.a), await self.info(self.b)
        names = self.names
        run = Run(names[first], names[end], first, end - first)
        addresses = tuple(source["addresses"])
        position = first * BLOCK
        plan = Plan(parse_holder(source["holder"].encode()), addresses, run, position, position, codec, deadline)
        fields = {
            "key_id": self.keyring.key_id(DEFAULT_TENANT),
            "target": parse_holder(target["holder"].encode()),
            "fidelity": Fidelity.QUANTIZED,
            "expires_at": time.time() + 30,
        }
        return sign(plan, Grant(**{**fields, **grant}), self.keyring)

    async def ask(
        self, worker: SimulatedWorker, *plans: Any, fidelity: str = "quantized", text: str = TEXT, **fields: Any
    ) -> httpx.Response:
        body = {"model": "simulated", "prompt": text, "max_tokens": 2, "cache_salt": self.salt(), **fields}
        if plans:
            body["kv_transfer_params"] = {PARAMETER: list(plans)}
        answer = await self.http.post(
            f"{worker.url}/v1/completions", json=body, headers={"x-ropeway-fidelity": fidelity}
        )
        assert answer.status_code == 200, answer.text
        return answer


def cached(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def report(answer: httpx.Response) -> dict[str, str]:
    return dict(part.strip().split("=") for part in answer.headers["x-ropeway-transfer"].split(";"))


StartPair = Callable[..., Any]


@pytest.fixture
async def start_pair() -> AsyncIterator[StartPair]:
    keyring = Keyring.generate()
    workers: list[SimulatedWorker] = []
    async with httpx.AsyncClient(timeout=20, trust_env=False) as http:

        async def start(
            speed: float = float("inf"), link_a: LinkConfig = LINK, link_b: LinkConfig = LINK, **config: Any
        ) -> Pair:
            for link in (link_a, link_b):
                settings = SimulatedConfig(**{"speed": speed, "blocks_total": 4096, "link": link, **config})
                workers.append(SimulatedWorker(settings, keyring=keyring))
                await workers[-1].start()
            return Pair(keyring, workers[0], workers[1], http)

        yield start
        for worker in workers:
            await worker.stop()


@pytest.fixture
async def pair(start_pair: StartPair) -> Pair:
    pair: Pair = await start_pair()
    await pair.ask(pair.a)
    return pair


def stored(worker: SimulatedWorker) -> list[BlockStored]:
    """By its event stream."""
    assert worker.publisher is not None
    context: zmq.Context[Any] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(worker.publisher.replay_endpoint)
    dealer.send_multipart([b"", bytes(8)])
    events: list[BlockStored] = []
    try:
        while True:
            assert dealer.poll(5000)
            *_, sequence, payload = dealer.recv_multipart()
            if sequence == END_OF_REPLAY:
                return events
            events += [event for event in decode_batch(payload).events if isinstance(event, BlockStored)]
    finally:
        dealer.close(linger=0)
        context.term()


async def test_it_says_what_it_can_do(pair: Pair) -> None:
    a, b = await pair.info(pair.a), await pair.info(pair.b)
    assert a["compatibility"] == b["compatibility"]
    assert a["codecs"] == ["raw", "i8"]
    assert a["bytes_per_token"] == 131_072
    holder = parse_holder(a["holder"].encode())
    assert (holder.name, holder.epoch) == (pair.a.url.removeprefix("http://"), pair.a.engine.info.epoch)
    assert a["holder"] != b["holder"]


async def test_a_worker_without_a_link_says_nothing(worker: SimulatedWorker, http: httpx.AsyncClient) -> None:
    assert "transfer" not in (await http.get("/server_info")).json()


async def test_what_was_pulled_is_not_computed(pair: Pair) -> None:
    answer = await pair.ask(pair.b, await pair.plan())
    assert cached(answer) == BLOCKS * BLOCK - BLOCK * (len(TOKENS) % BLOCK == 0)
    assert answer.headers["x-ropeway-fidelity"] == "quantized"
    said = report(answer)
    assert (said["outcome"], said["tokens"], said["sources"]) == ("fetched", str(BLOCKS * BLOCK), "1")
    assert int(said["bytes"]) == pytest.approx(BLOCKS * BLOCK * 131_072 / 1.94, rel=0.001)
    assert pair.a.engine.transfers is not None
    assert pair.a.engine.transfers.metrics.served == 1
    again = await pair.ask(pair.b)
    assert (cached(again), again.headers["x-ropeway-fidelity"]) == (cached(answer), "quantized")
    assert "x-ropeway-transfer" not in again.headers


async def test_raw_is_exact_and_serves_everyone(pair: Pair) -> None:
    answer = await pair.ask(pair.b, await pair.plan(codec="raw"))
    assert (report(answer)["outcome"], answer.headers["x-ropeway-fidelity"]) == ("fetched", "exact")
    assert cached(await pair.ask(pair.b, fidelity="exact")) == cached(answer)


async def test_quantized_blocks_and_what_follows_them_never_serve_who_wants_exact_ones(pair: Pair) -> None:
    longer = TEXT + "and down again on the other side " * 4
    first = await pair.ask(pair.b, await pair.plan(), text=longer)
    assert cached(first) == BLOCKS * BLOCK
    exact = await pair.ask(pair.b, text=longer, fidelity="exact")
    assert (cached(exact), exact.headers["x-ropeway-fidelity"]) == (0, "exact")
    # Who takes both takes the exact ones, now that they are there.
    both = await pair.ask(pair.b, text=longer)
    assert (cached(both), both.headers["x-ropeway-fidelity"]) == (len(longer) // BLOCK * BLOCK, "exact")


async def test_events_say_how_good_blocks_are_and_name_them_apart(pair: Pair) -> None:
    await pair.ask(pair.b, await pair.plan(end=40))
    events = stored(pair.b)
    assert [len(event.block_hashes) for event in events] == [40, BLOCKS - 40]
    assert [stated_fidelity(event.cache_salt) for event in events] == [Fidelity.QUANTIZED] * 2
    assert events[1].parent_block_hash == events[0].block_hashes[-1]
    assert list(events[0].token_ids) == TOKENS[: 40 * BLOCK]
    exact = stored(pair.a)
    assert stated_fidelity(exact[0].cache_salt) is Fidelity.EXACT
    assert not set(exact[0].block_hashes) & set(events[0].block_hashes)


async def test_a_part_is_pulled_after_what_is_there(pair: Pair) -> None:
    await pair.ask(pair.b, text=TEXT[: 20 * BLOCK])
    answer = await pair.ask(pair.b, await pair.plan(first=20))
    assert report(answer)["tokens"] == str((BLOCKS - 20) * BLOCK)
    # The exact beginning does not make the answer exact.
    assert answer.headers["x-ropeway-fidelity"] == "quantized"


async def test_several_plans_one_after_the_other(pair: Pair) -> None:
    answer = await pair.ask(pair.b, await pair.plan(end=30), await pair.plan(first=30))
    assert (report(answer)["outcome"], report(answer)["tokens"]) == ("fetched", str(BLOCKS * BLOCK))
    held = await pair.ask(pair.b, await pair.plan())
    assert (report(held)["outcome"], report(held)["bytes"]) == ("held", "0")


async def test_over_tls(start_pair: StartPair, tmp_path: Path) -> None:
    authority = Authority.make(tmp_path)
    links = [LinkConfig(100.0, tls=authority.member(name)) for name in ("a", "b")]
    pair = await start_pair(link_a=links[0], link_b=links[1])
    await pair.ask(pair.a)
    assert (await pair.info(pair.a))["addresses"][0].startswith("simulated+tls://127.0.0.1:")
    assert report(await pair.ask(pair.b, await pair.plan()))["outcome"] == "fetched"


@pytest.mark.parametrize("safe_one", ["link_a", "link_b"])
async def test_tls_and_none_do_not_mix(start_pair: StartPair, tmp_path: Path, safe_one: str) -> None:
    pair = await start_pair(**{safe_one: LinkConfig(100.0, tls=Authority.make(tmp_path).member())})
    await pair.ask(pair.a)
    refused = report(await pair.ask(pair.b, await pair.plan()))
    assert (refused["outcome"], refused["reason"]) == ("refused", "unreachable")


async def test_two_that_want_the_same_run_move_it_once(start_pair: StartPair) -> None:
    pair = await start_pair(speed=1.0, link_b=LinkConfig(100.0))
    await pair.ask(pair.a)
    plan = await pair.plan()
    answers = await asyncio.gather(pair.ask(pair.b, plan), pair.ask(pair.b, plan))
    assert sorted(report(answer)["outcome"] for answer in answers) == ["fetched", "held"]
    assert cached(answers[0]) == cached(answers[1]) > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fidelity": Fidelity.EXACT}, "unexpected"),
        ({"expires_at": 1.0}, "expired"),
        ({"key_id": None}, "other_tenant"),
        ({"target": None}, "other_target"),
    ],
)
async def test_what_a_capability_does_not_allow(pair: Pair, change: dict[str, Any], reason: str) -> None:
    if "key_id" in change:
        change = {"key_id": pair.keyring.key_id(TenantId("other"))}
    if "target" in change:
        change = {"target": parse_holder((await pair.info(pair.a))["holder"].encode())}
    answer = await pair.ask(pair.b, await pair.plan(**change))
    assert (report(answer)["outcome"], report(answer)["reason"]) == ("refused", reason)
    assert cached(answer) == 0


@pytest.mark.parametrize("plan", [None, 7, {"version": 1}, "rwc1.", [[]]])
async def test_what_is_no_plan_costs_that_plan_alone(pair: Pair, plan: Any) -> None:
    answer = await pair.ask(pair.b, plan)
    assert (report(answer)["outcome"], report(answer)["reason"]) == ("refused", "malformed")


async def test_a_plan_for_another_prompt(pair: Pair) -> None:
    answer = await pair.ask(pair.b, await pair.plan(), text="x" * len(TEXT))
    assert (report(answer)["reason"], cached(answer)) == ("unexpected", 0)


async def test_a_request_that_wants_exact_kv_takes_no_other(pair: Pair) -> None:
    answer = await pair.ask(pair.b, await pair.plan(), fidelity="exact")
    assert (report(answer)["reason"], answer.headers["x-ropeway-fidelity"]) == ("unexpected", "exact")


async def test_blocks_that_the_source_no_longer_has(pair: Pair) -> None:
    plan = await pair.plan()
    await pair.http.post(f"{pair.a.url}/reset_prefix_cache")
    answer = await pair.ask(pair.b, plan)
    assert (report(answer)["outcome"], report(answer)["reason"]) == ("refused", "stale")


async def test_a_source_that_is_gone(pair: Pair) -> None:
    plan = await pair.plan()
    await pair.a.stop()
    answer = await pair.ask(pair.b, plan)
    assert (report(answer)["outcome"], report(answer)["reason"]) == ("failed", "unreachable")
    assert cached(answer) == 0


@pytest.mark.parametrize(
    ("fault", "outcome", "reason"),
    [("refuse", "refused", "busy"), ("hang", "failed", "deadline"), ("fail", "failed", "closed")],
)
async def test_a_source_that_misbehaves(pair: Pair, fault: str, outcome: str, reason: str) -> None:
    await pair.http.post(f"{pair.a.url}/simulate", json={"transfer": fault, "transfer_pulls": 1})
    spoilt = await pair.ask(pair.b, await pair.plan(deadline=0.2))
    assert (report(spoilt)["outcome"], report(spoilt)["reason"], cached(spoilt)) == (outcome, reason, 0)
    await pair.http.post(f"{pair.b.url}/reset_prefix_cache")
    assert report(await pair.ask(pair.b, await pair.plan()))["outcome"] == "fetched"


async def test_no_room_for_what_was_pulled(start_pair: StartPair) -> None:
    pair = await start_pair(speed=1.0, blocks_total=100)
    await pair.ask(pair.a)
    hog = asyncio.create_task(pair.ask(pair.b, text="y" * 60 * BLOCK, max_tokens=60))
    while pair.b.engine.metrics.requests_running == 0:
        await asyncio.sleep(0.005)
    answer = await pair.ask(pair.b, await pair.plan())
    assert (report(answer)["outcome"], report(answer)["reason"]) == ("failed", "unusable")
    hog.cancel()
    await asyncio.gather(hog, return_exceptions=True)


async def test_who_loads_keeps_its_place_and_holds_nobody_up(start_pair: StartPair) -> None:
    pair = await start_pair(speed=1.0)
    await pair.ask(pair.a)
    await pair.http.post(f"{pair.a.url}/simulate", json={"transfer": "hang"})
    loading = asyncio.create_task(pair.ask(pair.b, await pair.plan(deadline=2.0)))
    while not pair.b.engine.metrics.requests_waiting:
        await asyncio.sleep(0.005)
    other = await pair.ask(pair.b, text="somebody else")
    assert other.status_code == 200
    assert not loading.done()
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    while pair.b.engine.metrics.requests_waiting:
        await asyncio.sleep(0.005)


def test_an_uplink_is_shared() -> None:
    uplink = Uplink(LinkConfig(8.0, latency_seconds=0.1), speed=1.0)
    assert uplink.send(1_000_000_000, 0.0) == pytest.approx(1.1)
    assert uplink.send(1_000_000_000, 0.5) == pytest.approx(2.1)
    assert uplink.send(0, 10.0) == pytest.approx(10.1)
    assert Uplink(LinkConfig(8.0, 0.1), speed=10.0).send(1_000_000_000, 0.0) == pytest.approx(0.11)


def test_a_link_needs_a_keyring() -> None:
    with pytest.raises(ValueError, match="keyring"):
        SimulatedWorker(SimulatedConfig(link=LINK))
