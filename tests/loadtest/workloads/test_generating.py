"""Workloads: the same by seed, sound, and of the shape that their names promise."""

import re
from collections import Counter
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from cachecore.prompts.plain import PlainRenderer
from loadtest.audit.ceilings import Ceilings
from loadtest.traces.contract import NO_PREDECESSOR, Trace
from loadtest.traces.reading import FORMATS_BY_NAME
from loadtest.workloads.drawing import Zipf, around, geometric
from loadtest.workloads.generating import WORKLOADS, generate

SMALL = 300


@pytest.fixture(scope="module", params=list(WORKLOADS))
def trace(request: pytest.FixtureRequest) -> Trace:
    return generate(request.param, seed=1, requests=SMALL)


def test_there_are_the_workloads_that_commands_offer() -> None:
    assert {"multi-agent-swe", "rag", "chat", "batch", "agent-tools"} < WORKLOADS.keys()
    assert {"tenants", "tenants-long", "tenants-flat", "tenants-cold"} < WORKLOADS.keys()
    assert {"fan-out", "fan-out-small", "burst", "agents", "agents-many"} < WORKLOADS.keys()
    for name, workload in WORKLOADS.items():
        assert workload.name == name
        assert workload.summary


def test_a_workload_is_sound(trace: Trace) -> None:
    assert len(trace.requests) == SMALL
    arrivals = [request.arrival_seconds for request in trace.requests]
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    for place, request in enumerate(trace.requests):
        assert request.blocks == request.input_tokens // trace.block_size_tokens
        assert request.output_tokens > 0
        assert NO_PREDECESSOR <= request.follows < place
        assert request.body is None


def test_a_seed_says_all(trace: Trace) -> None:
    again = generate(trace.name, seed=1, requests=SMALL)
    assert again == trace
    assert generate(trace.name, seed=2, requests=SMALL).requests != trace.requests


def test_conversations_grow(trace: Trace) -> None:
    """A turn's prompt begins with the prompt that it follows, where both are of one conversation."""
    turns = [
        (trace.requests[request.follows], request)
        for request in trace.requests
        if request.follows != NO_PREDECESSOR and trace.requests[request.follows].session == request.session
    ]
    for before, turn in turns:
        assert turn.chain[: len(before.chain)] == before.chain
        assert turn.input_tokens > before.input_tokens + before.output_tokens
        assert turn.arrival_seconds == pytest.approx(before.arrival_seconds + turn.delay_seconds)
    loops = {"multi-agent-swe", "rag", "chat", "agent-tools", "agents", "agents-many"}
    assert bool(turns) == (trace.name in loops)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("tenants", 0.68, 0.82),
        ("tenants-cold", 0.45, 0.60),
        ("fan-out", 0.83, 0.86),
        ("fan-out-small", 0.64, 0.70),
        ("burst", 0.92, 0.96),
        ("agents", 0.88, 0.95),
        ("multi-agent-swe", 0.85, 0.95),
        ("rag", 0.30, 0.55),
        ("chat", 0.60, 0.85),
        ("batch", 0.45, 0.65),
        ("agent-tools", 0.85, 0.95),
    ],
)
def test_what_could_be_reused(name: str, least: float, most: float) -> None:
    assert least < Ceilings(generate(name, 3, requests=1_000)).infinite().tokens < most


def test_tenants_are_zipf_and_ask_at_the_rate() -> None:
    trace = generate("tenants", 1, requests=3_000, rate=20.0)
    assert trace.duration_seconds == pytest.approx(150.0, rel=0.07)
    counts = Counter(request.tenant for request in trace.requests)
    assert counts["tenant-0"] / counts["tenant-9"] == pytest.approx(10, rel=0.5)
    assert len(counts) > 140
    assert fmean(request.input_tokens for request in trace.requests) == pytest.approx(6 * 1024 + 1_100, rel=0.02)


def test_siblings_come_within_milliseconds_and_share_their_prompt() -> None:
    trace = generate("fan-out", 1, requests=80, rate=0.01, block_size_tokens=64)
    for start in range(0, 80, 8):
        group = trace.requests[start : start + 8]
        assert group[7].arrival_seconds - group[0].arrival_seconds == pytest.approx(0.035)
        shared = 16 * 1024 // 64 * 16
        assert len({request.chain[:shared] for request in group}) == 1
        assert len({request.chain[shared : shared + 16] for request in group}) == 8
    assert len({request.chain[:16] for request in trace.requests}) == 10


def test_agents_turns() -> None:
    trace = generate("agents", 1, requests=3_000)
    turns = Counter(request.session for request in trace.requests)
    assert fmean(turns.values()) == pytest.approx(12.0, rel=0.15)
    followers = [request for request in trace.requests if request.follows != NO_PREDECESSOR]
    growth = [request.input_tokens - trace.requests[request.follows].input_tokens for request in followers]
    assert fmean(growth) == pytest.approx(1_400, rel=0.05)
    pauses = [request.delay_seconds for request in followers]
    assert min(pauses) >= 0.3
    assert fmean(pauses) == pytest.approx(6.3, rel=0.05)
    assert 36 <= len({request.tenant for request in trace.requests}) <= 40


def test_a_team_begins_with_siblings() -> None:
    trace = generate("multi-agent-swe", 1, requests=600)
    followers = Counter(request.follows for request in trace.requests if request.session.startswith("worker"))
    assert max(followers.values()) >= 3


@pytest.mark.parametrize("block", [16, 64, 512])
def test_block_sizes_change_names_and_nothing_else(block: int) -> None:
    trace = generate("chat", 5, requests=50, block_size_tokens=block)
    assert [r._replace(chain=b"") for r in trace.requests] == [
        r._replace(chain=b"") for r in generate("chat", 5, requests=50).requests
    ]
    assert trace.block_size_tokens == block


def test_bodies_share_what_their_names_share(trace: Trace) -> None:
    """With a character a token, the text that two prompts begin with alike is as long as the tokens they share."""
    sent = generate(trace.name, 1, requests=24, bodies=True, characters_per_token=1.0, block_size_tokens=64)
    renderer = PlainRenderer()
    texts = ["".join(renderer.chat(request.body or {}).segments) for request in sent.requests]
    for one, request in zip(texts, sent.requests, strict=True):
        assert len(one) == pytest.approx(request.input_tokens, rel=0.75)
        for other, second in zip(texts, sent.requests, strict=True):
            blocks = sum(1 for a, b in zip(one_by_one(request), one_by_one(second), strict=False) if a == b)
            assert len(common_prefix(one, other)) >= 0.9 * 64 * blocks - 64


def one_by_one(request: object) -> list[bytes]:
    chain = request.chain  # type: ignore[attr-defined]
    return [chain[at : at + 16] for at in range(0, len(chain), 16)]


def common_prefix(one: str, other: str) -> str:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return one[:low]


def test_bodies_are_valid_chats() -> None:
    trace = generate("agent-tools", 1, requests=30, bodies=True)
    bodies = [request.body for request in trace.requests if request.body]
    assert len(bodies) == 30
    longest = max(bodies, key=lambda body: len(body["messages"]))
    assert len(longest["tools"]) == 14
    assert [message["role"] for message in longest["messages"][:3]] == ["system", "user", "assistant"]
    for place, message in enumerate(longest["messages"]):
        if message["role"] == "tool":
            calls = longest["messages"][place - 1]["tool_calls"]
            assert [call["id"] for call in calls] == [message["tool_call_id"]]
    assert all(request.body["max_tokens"] == request.output_tokens for request in trace.requests if request.body)


@pytest.mark.parametrize(("requests", "rate"), [(0, None), (-1, None), (5, 0.0), (5, float("nan"))])
def test_nothing_and_no_rate_are_refused(requests: int, rate: float | None) -> None:
    with pytest.raises(ValueError, match="at least one request and a rate above 0"):
        generate("chat", requests=requests, rate=rate)
    with pytest.raises(KeyError):
        generate("nonsense")


def test_progress_reaches_its_end() -> None:
    seen: list[tuple[int, int]] = []
    generate("tenants", requests=600, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(256, 600), (512, 600), (600, 600)]


def test_draws() -> None:
    rng = Random(2)
    lengths = [around(rng, 200, 0.5) for _ in range(5_000)]
    assert fmean(lengths) == pytest.approx(200, rel=0.04)
    counts = [geometric(rng, 12.0) for _ in range(5_000)]
    assert (min(counts), geometric(rng, 1.0)) == (1, 1)
    assert fmean(counts) == pytest.approx(12.0, rel=0.06)
    ranks = Counter(Zipf(50, 0.8).draw(rng) for _ in range(20_000))
    assert ranks.keys() == set(range(50))
    assert ranks[0] / ranks[31] == pytest.approx(32**0.8, rel=0.2)


def test_the_page_on_traffic_names_all_there_is() -> None:
    page = (Path(__file__).parents[3] / "docs" / "traces.md").read_text()
    files, workloads = page.split("## Workloads")
    rows = re.compile(r"^\| `([a-z0-9-]+)` \|", re.MULTILINE)
    assert sorted(rows.findall(files)) == sorted(FORMATS_BY_NAME)
    assert rows.findall(workloads) == list(WORKLOADS)
