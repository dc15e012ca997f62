"""Can a tenant learn from time to first token whether another one has cached a text?

An attacker asks texts, of which the victim has asked one half just before, and times the answers. Trials come in pairs:
of a text that the victim has asked, and of one that it has not (it then asked another one, so that the machine has done
as much), in random order, those of the two namespaces among each other. Across tenants a permutation test must see
nothing; where both say `public` it must see nearly every pair, or it could see nothing at all.

    ROPEWAY_TIMING_TRIALS=1000    across tenants; a fifth as many in the shared namespace
    ROPEWAY_TIMING_SEED=...       as printed by a run that is to be repeated
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

import httpx
import pytest

from gateway.api_keys import add_api_key
from tests.gateway.end_to_end import models
from tests.gateway.end_to_end.processes import HOST, Fleet, Gateway, Process, eventually, free_ports, new_keyring
from tests.security.statistics import Pair, Verdict, judge

pytestmark = pytest.mark.timing

TRIALS = int(os.environ.get("ROPEWAY_TIMING_TRIALS", "1000"))
SEED = int(os.environ.get("ROPEWAY_TIMING_SEED", str(time.time_ns() % 2**32)))
P_MIN = 0.01
WORDS = ("rope", "cabin", "tower", "valley", "wheel", "cable", "summit", "station", "snow", "pine", "ridge", "stream")
PUBLIC = {"x-ropeway-namespace": "public"}

Ask = Callable[[str, str, bool], float]
"""(tenant, text, whether in the shared namespace) to seconds."""


class Trial(NamedTuple):
    is_public: bool
    is_cached: bool


def text(random: Random, words: int) -> str:
    """No two have a block in common: the first words are a number that nobody has had."""
    return f"{random.getrandbits(96):024x} " + " ".join(random.choice(WORDS) for _ in range(words))


def run(ask: Ask, random: Random, words: int) -> tuple[Verdict, Verdict]:
    """What can be told across tenants, and what in the shared namespace."""
    pairs = [False] * (TRIALS // 2) + [True] * max(TRIALS // 10, 10)
    random.shuffle(pairs)
    seen: dict[bool, list[Pair]] = {False: [], True: []}
    for is_public in pairs:
        cached_first = random.random() < 0.5
        seconds = {}
        for is_cached in (cached_first, not cached_first):
            asked, other = text(random, words), text(random, words)
            ask("victim", asked if is_cached else other, is_public)
            seconds[is_cached] = ask("attacker", asked, is_public)
        seen[is_public].append(Pair(seconds[True], seconds[False]))
    return judge(seen[False], random), judge(seen[True], random)


def hold(ask: Ask, words: int, told_apart_min: float) -> None:
    """One experiment in a hundred looks like something where nothing is: then it takes a second one to convict."""
    for attempt in range(2):
        print(f"\nseed {SEED + attempt}")
        across, shared = run(ask, Random(SEED + attempt), words)
        print(f"across tenants: {across}\nin the shared namespace: {shared}")
        missed = (1 - shared.pairs_told_apart) * shared.trials / 2
        assert missed <= max((1 - told_apart_min) * shared.trials / 2, 1), "the test cannot see"
        if across.p > P_MIN:
            return
    pytest.fail(f"tenants can tell what others have cached: {across}")


@contextmanager
def clients(
    directory: Path, urls: list[str], keyring: str, config: dict[str, object]
) -> Iterator[dict[str, httpx.Client]]:
    """Of both tenants, before a gateway; each has a connection of its own that stays open."""
    file = directory / "keys.jsonl"
    keys = {tenant: add_api_key(file, tenant, public=True) for tenant in ("victim", "attacker")}
    whole = {**config, "keyring": keyring, "tenants": {"api_keys_file": str(file)}}
    with Gateway(directory, urls, whole) as gateway:
        opened = {
            tenant: httpx.Client(
                base_url=gateway.url,
                timeout=models.SECONDS_MAX,
                trust_env=False,
                headers={"authorization": f"Bearer {key}"},
            )
            for tenant, key in keys.items()
        }
        try:
            yield opened
        finally:
            for client in opened.values():
                client.close()


@pytest.mark.model
def test_time_to_first_token_of_a_real_model(tmp_path: Path) -> None:
    tokenizer, keyring, (port,) = models.tokenizer(), str(new_keyring(tmp_path)), free_ports(1)
    flags = [*models.FLAGS, "--port", str(port), "--keyring", keyring]
    config = {"tokenizers": {models.MODEL: tokenizer}}
    with Process("worker", ["worker", "reference", *flags], tmp_path) as worker:
        eventually(lambda: "ready http" in worker.said(), "the worker is ready", models.SECONDS_MAX)
        with clients(tmp_path, [f"http://{HOST}:{port}"], keyring, config) as opened:

            def ask(tenant: str, content: str, is_public: bool) -> float:
                body = {
                    "model": models.MODEL,
                    "prompt": content,
                    "max_tokens": 1,
                    "temperature": 0,
                    "stream": True,
                }
                return first_token_seconds(opened[tenant], body, is_public)

            hold(ask, 128, 0.95)


def first_token_seconds(client: httpx.Client, body: dict[str, object], is_public: bool) -> float:
    began = time.perf_counter()
    headers = PUBLIC if is_public else {}
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200
        if not is_public:
            assert answer.headers["x-ropeway-matched-tokens"] == "0"
        lines = answer.iter_lines()
        while not next(lines).startswith("data: "):
            pass
        seconds = time.perf_counter() - began
        for _ in lines:
            pass
    return seconds


def test_how_long_the_gateway_takes_to_name_a_prompt(tmp_path: Path) -> None:
    """What it remembers of one tenant's texts makes it no faster for another (`/route/explain` does nothing else)."""
    keyring = str(new_keyring(tmp_path))
    with (
        Fleet(tmp_path, "--speed", "1000", "--keyring", keyring, count=1) as fleet,
        clients(tmp_path, fleet.urls, keyring, {"limits": {"long_prompt_characters": 10_000_000}}) as opened,
    ):

        def ask(tenant: str, content: str, is_public: bool) -> float:
            body = {"model": "simulated", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
            began = time.perf_counter()
            answer = opened[tenant].post("/route/explain", json=body, headers=PUBLIC if is_public else {})
            seconds = time.perf_counter() - began
            assert answer.status_code == 200
            return seconds

        hold(ask, 20_000, 0.8)
