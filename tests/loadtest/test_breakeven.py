"""The break-even table against arithmetic done by hand and against published measurements of fetches."""

import json

import pytest

import ropeway
from loadtest.breakeven import TOKENS_MAX, Way, break_even, break_even_gbps, fetching, pays_from, ways_over
from loadtest.hardware import CODECS, LINKS, TIERS
from loadtest.models import MODELS
from loadtest.profiles import profile_for
from policies.transfer import LAYERS
from workers.timing import LLAMA_3_70B_TP8, TimingProfile

RAW, I8 = CODECS["raw"], CODECS["i8"]
MEMORY, HOST, NVME = TIERS["memory"], TIERS["host"], TIERS["nvme"]
ROCE = Way(MEMORY, LINKS["roce-400"], RAW, 8)


def linear(tokens_per_second: float, kv_bytes_per_token: int) -> TimingProfile:
    """An engine without constants and without attention."""
    seconds = 1 / tokens_per_second
    return TimingProfile("linear", "made up", 0.0, seconds, kv_bytes_per_token=kv_bytes_per_token)


@pytest.mark.parametrize(
    ("profile", "compression", "gbps"),
    [
        (LLAMA_3_70B_TP8, 1.0, 74),
        (LLAMA_3_70B_TP8, 2.0, 37),  # KV in fp8
        (linear(48_434, 131_072), 1.0, 51),  # Llama-3-8B at the rate of Dynamo's mock engine
        (linear(10_000, MODELS["deepseek-v3"].kv_bytes_per_token), 1.0, 5.6),
    ],
)
def test_the_break_even_link_is_the_published_one(profile: TimingProfile, compression: float, gbps: float) -> None:
    assert break_even_gbps(profile, compression) == pytest.approx(gbps, rel=0.01)


@pytest.mark.parametrize(("codec", "gigabytes"), [("raw", 9.3), ("i8", 4.8), ("i4h", 2.6)])
def test_codecs_lower_the_break_even_as_published(codec: str, gigabytes: float) -> None:
    """Llama-3-70B on eight H100 at half of peak, 28,000 tokens/s."""
    assert break_even_gbps(LLAMA_3_70B_TP8, CODECS[codec].compression) / 8 == pytest.approx(gigabytes, rel=0.015)


def test_at_the_break_even_link_a_fetch_takes_as_long_as_computing() -> None:
    profile = linear(1_000, 1_000_000)
    link = LINKS["roce-400"]._replace(gbps=break_even_gbps(profile), share=1.0, latency_seconds=0.0)
    load = fetching(profile, Way(MEMORY, link, RAW), 5_000).load_seconds
    assert load == pytest.approx(profile.prompt_seconds(5_000)) == 5.0


def test_a_fetch_by_hand() -> None:
    """Llama-3-70B, 16,384 tokens over 400 Gb/s, and a question of 512 behind them."""
    load = 0.005 + 16_384 * 327_680 / 45e9
    after = 0.004 + 512 * (140e9 + 2.62e6 * (16_384 + 256)) / 3.96e15
    tail = 0.004 + (after - 0.004) / LAYERS
    row = break_even(LLAMA_3_70B_TP8, [ROCE], [16_384]).rows[0]
    (cell,) = row.cells
    assert cell.fetch_ms == pytest.approx(1e3 * (load + after), rel=1e-4)
    assert cell.overlapped_ms == pytest.approx(1e3 * (load + tail), rel=1e-4)
    assert cell.recompute_ms == pytest.approx(1e3 * LLAMA_3_70B_TP8.prompt_seconds(16_896))
    assert cell.pays


def test_a_load_shorter_than_the_question_hides_behind_it() -> None:
    long_question = fetching(LLAMA_3_70B_TP8, ROCE, 1_024, suffix_tokens=8_192)
    assert long_question.load_seconds < long_question.after_seconds
    assert long_question.first_token_seconds < 1.05 * long_question.after_seconds


@pytest.mark.parametrize(
    ("tokens", "measured_ms"), [(2_048, 49.0), (8_192, 120.1), (16_384, 196.2), (32_768, 376.3), (49_152, 550.5)]
)
def test_pulls_over_nixl_take_what_llm_d_measured(tokens: int, measured_ms: float) -> None:
    """llm-d, guides/p2p-kv-cache-sharing, gpt-oss-120b: the link is fitted to the first and last row of the five."""
    profile = profile_for("gpt-oss-120b", "h200")
    pulled = fetching(profile, Way(HOST, LINKS["nixl-host"], RAW), tokens, suffix_tokens=1)
    assert 1e3 * pulled.first_token_seconds == pytest.approx(measured_ms, rel=0.08)


def test_pulls_over_nixl_pay_from_where_llm_d_found_it() -> None:
    """Its crossover is below 2,048 tokens, where computing was measured at 70.6 ms and is 48 here."""
    profile = profile_for("gpt-oss-120b", "h200")
    least = pays_from(profile, Way(HOST, LINKS["nixl-host"], RAW), suffix_tokens=1)
    assert least is not None
    assert 1_024 < least < 2_560


def test_mooncake_moves_32k_tokens_of_qwen3_8b_in_its_measured_time() -> None:
    """Mooncake, docs/source/performance: 31.65 ms over eight RoCE ports; 0.54 ms for 128 tokens."""
    way, profile = Way(MEMORY, LINKS["roce-8x200"], RAW), profile_for("qwen3-8b", "h100")
    assert 1e3 * fetching(profile, way, 32_000).load_seconds == pytest.approx(31.65, rel=0.07)
    assert 1e3 * fetching(profile, way, 128).load_seconds == pytest.approx(0.54, rel=0.3)


def test_host_memory_is_read_as_fast_as_measured_on_an_h20() -> None:
    """Qwen3-Coder-30B-A3B (98,304 B a token), 65,536 tokens: a hit in host memory took 161 ms more than one in HBM."""
    seconds = 65_536 * 98_304 / HOST.rate(1)
    assert seconds == pytest.approx(0.161, rel=0.1)
    assert HOST.rate(8) == 8 * HOST.rate(1)
    assert NVME.rate(8) == NVME.rate(1)


def test_ten_gigabit_loses_with_every_codec_and_400_wins_with_each() -> None:
    for codec in CODECS.values():
        slow, fast = (Way(MEMORY, LINKS[link], codec, 8) for link in ("10gbe", "roce-400"))
        cells = [break_even(LLAMA_3_70B_TP8, [way], [32_768]).rows[0].cells[0].pays for way in (slow, fast)]
        assert cells == [False, True], codec.name


def test_it_pays_at_every_length_from_the_one_named() -> None:
    way = Way(MEMORY, LINKS["25gbe"], I8, 8)
    least = pays_from(LLAMA_3_70B_TP8, way)
    assert least is not None
    below, *above = break_even(LLAMA_3_70B_TP8, [way], [least - 1, least, least + 999, TOKENS_MAX]).rows[0].cells
    assert not below.pays
    assert all(cell.pays for cell in above)
    assert pays_from(LLAMA_3_70B_TP8, Way(MEMORY, LINKS["10gbe"], RAW, 8)) is None


def test_what_a_machine_has_itself_needs_no_link() -> None:
    ways = ways_over([MEMORY, HOST], [LINKS["10gbe"]], [RAW], 8)
    assert [(way.tier.name, way.link_name) for way in ways] == [
        ("memory", "10gbe"),
        ("host", "local"),
        ("host", "10gbe"),
    ]


def test_the_command_prints_json_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert ropeway.main(["benchmark", "--gpu", "h100", "--lengths", "4096,1024", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["profile"] == "llama-3-70b-tp8"
    assert document["break_even_gbps"] == pytest.approx(74, abs=0.5)
    assert document["gpus"] == 8
    rows = document["rows"]
    assert {(row["link"], row["codec"]) for row in rows if row["tier"] == "memory"} == {
        (link, codec) for link in ("10gbe", "25gbe", "100gbe", "roce-400") for codec in ("raw", "i8")
    }
    assert [row["tokens"] for row in rows[:2]] == [1_024, 4_096]
    assert {row["tier"] for row in rows} | {"llama-3-70b-tp8", "codecs"} <= set(document["sources"])


def test_a_machine_brings_its_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert ropeway.main(["benchmark", "--gpu", "g6e.8xlarge", "--model", "llama-3-8b", "--json"]) == 0
    assert "25 Gb/s" in {row["link"] for row in json.loads(capsys.readouterr().out)["rows"]}


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert ropeway.main(["benchmark", "--gpu", "h200", "--model", "gpt-oss-120b", "--link", "10gbe,400"]) == 0
    said = capsys.readouterr().out
    assert "gpt-oss-120b-h200-tp1" in said
    assert "memory 400 Gb/s raw" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h10"], "argument --gpu: no GPU or machine 'h10'; there are a100,"),
        (["--gpu", "h100", "--model", "gpt-5"], "no model profile 'gpt-5'; there are llama-3-8b,"),
        (["--gpu", "a100", "--model", "deepseek-v3"], "deepseek-v3 does not fit on 8 x a100"),
        (["--gpu", "h100", "--link", "10gbe,string"], "argument --link: no link 'string'; there are 10gbe,"),
        (["--gpu", "h100", "--codec", "zip"], "argument --codec: no codec 'zip'; there are raw,"),
        (["--gpu", "h100", "--lengths", "1k"], "argument --lengths: a whole number is expected, not '1k'"),
        (["--gpu", "h100", "--lengths", ","], "argument --lengths: the list is empty"),
        (["--gpu", "h100", "--tensor-parallel", "0"], "argument --tensor-parallel: at least 1 is needed, not 0"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    try:
        code = ropeway.main(["benchmark", *arguments])
    except SystemExit as exit_:
        code = exit_.code
    said = capsys.readouterr()
    assert code == 2
    assert said.err.startswith(f"ropeway: error: {message}")
    assert said.err.count("\n") == 1
    assert said.out == ""
