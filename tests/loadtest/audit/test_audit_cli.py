"""`ropeway audit` as a user meets it."""

import json
from pathlib import Path

import pytest

import ropeway
from loadtest.audit.cli import _engine_of, _plan

ROWS = [
    {"timestamp": 0, "input_length": 1_200, "output_length": 20, "hash_ids": [0, 1, 2]},
    {"timestamp": 100, "input_length": 1_300, "output_length": 20, "hash_ids": [0, 1, 3]},
    {"timestamp": 250, "input_length": 600, "output_length": 20, "hash_ids": [0, 4]},
    {"timestamp": 431, "input_length": 1_200, "output_length": 20, "hash_ids": [0, 1, 2]},
]


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Of an application that tells its model what time it is."""
    rows = [
        {
            "timestamp": minute * 60.0,
            "request": {
                "model": "m",
                "messages": [
                    {"role": "system", "content": f"It is 2026-11-30 10:{minute:02}. {'Be kind to all. ' * 200}"},
                    {"role": "user", "content": "How do I return a parcel?"},
                ],
            },
        }
        for minute in range(12)
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def audited(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert ropeway.main(["audit", *arguments, "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return json.loads(said.out)


def plan_of(*arguments: str):
    return _plan(ropeway.parser().parse_args(["audit", *arguments]))


def test_a_trace_becomes_the_promised_json(capsys: pytest.CaptureFixture[str], mooncake: Path) -> None:
    document = audited(capsys, "--trace", str(mooncake), "--policies", "kv-aware,round-robin,dynamo", "--nodes", "2")
    assert document["trace"] == "trace.jsonl"
    assert document["hit_rate_infinite"] == round((2 + 1 + 3) / 11, 4)
    assert [row["policy"] for row in document["rows"]] == ["kv-aware", "round-robin", "dynamo"]
    assert {row["nodes"] for row in document["rows"]} == {2}
    assert document["slo_capacity"] == {}


def test_hit_rates_alone_need_no_replay(capsys: pytest.CaptureFixture[str], mooncake: Path) -> None:
    document = audited(capsys, "--trace", str(mooncake), "--hit-rate-only")
    assert document["hit_rate_infinite"] == 0.5455
    assert document["hit_rate_round_robin_2"] == 0.2727
    assert document["hit_rate_lru_1000"] == 0.5455
    assert document["rows"] == []


def test_a_log_with_a_clock_in_its_system_prompt_is_told_so(capsys: pytest.CaptureFixture[str], log: Path) -> None:
    document = audited(capsys, "--log-file", str(log), "--policies", "round-robin", "--block-size", "16")
    (found,) = (one for one in document["advice"] if one["topic"] == "divergence")
    assert found["field"] == "messages[0] (system).content"
    assert found["kind"] == "a clock"
    assert found["pairs"] == 11
    assert found["lost_tokens_p50"] > 700


def test_a_page_and_a_table(capsys: pytest.CaptureFixture[str], mooncake: Path, tmp_path: Path) -> None:
    page = tmp_path / "audit.html"
    arguments = ["--trace", str(mooncake), "--policies", "kv-aware,sglang", "--speedup", "1,2", "--seeds", "2"]
    assert ropeway.main(["audit", *arguments, "--html", str(page)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "kv-aware" in said.out
    assert "above 2" in said.out
    assert "<svg" in page.read_text()


def test_a_workload_brings_its_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of("--workload", "agents-many")
    assert (list(plan.nodes), plan.caches[0].text) == ([16], "1800")
    plan = plan_of("--workload", "agents-many", "--nodes", "2,4", "--capacity", "ample,20%")
    assert (plan.nodes, [cache.text for cache in plan.caches]) == ([2, 4], ["ample", "20%"])
    document = audited(capsys, "--workload", "fan-out", "--requests", "40", "--policies", "round-robin")
    assert document["facts"]["requests"] == 40


@pytest.mark.parametrize(
    ("arguments", "profile", "gpus"),
    [
        ([], "llama-3-70b-tp8", 8),
        (["--gpu", "h200", "--model", "gpt-oss-120b"], "gpt-oss-120b-h200-tp1", 1),
        (["--gpu", "g6e.12xlarge", "--model", "qwen3-32b"], "qwen3-32b-l40s-tp2", 2),
        (["--model", "llama-3-70b", "--tensor-parallel", "4"], "llama-3-70b-h100-tp4", 4),
        (["--engine", "dynamo-poly"], "dynamo-polynomial", 1),
    ],
)
def test_engines_by_name(arguments: list[str], profile: str, gpus: int) -> None:
    engine = _engine_of(ropeway.parser().parse_args(["audit", "--workload", "fan-out", *arguments]))
    assert (engine.profile.name, engine.gpus) == (profile, gpus)


def test_links_by_name_by_rate_and_none() -> None:
    plan = plan_of("--workload", "fan-out", "--link", "none,roce-400,25", "--codec", "i8")
    assert [link and link.gbps for link in plan.links] == [None, 400, 25]
    assert plan.codec.compression == 1.94


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments --trace --log-file --workload is required"),
        (["--trace", "/nonexistent.jsonl"], "argument --trace: /nonexistent.jsonl: no such file"),
        (["--workload", "games"], "argument --workload: no workload 'games'; there are "),
        (
            ["--workload", "fan-out", "--policies", "kv-aware,best"],
            "argument --policies: no policy 'best'; there are kv-aware,",
        ),
        (["--workload", "fan-out", "--gpu", "tpu"], "argument --gpu: no GPU or machine 'tpu'"),
        (["--workload", "fan-out", "--model", "gpt-4"], "argument --model: no model profile 'gpt-4'"),
        (["--workload", "fan-out", "--engine", "x"], "argument --engine: no timing profile 'x'"),
        (["--workload", "fan-out", "--capacity", "much"], "argument --capacity: engine, ample, a number of blocks"),
        (["--workload", "fan-out", "--link", "rope"], "argument --link: no link 'rope'"),
        (
            ["--workload", "fan-out", "--html", "/nonexistent/page.html"],
            "argument --html: /nonexistent/page.html: no file",
        ),
        (["--workload", "fan-out", "--nodes", "0"], "argument --nodes: at least 1 is needed, not 0"),
        (["--workload", "fan-out", "--speedup", "fast"], "argument --speedup: a number is expected, not 'fast'"),
        (["--workload", "fan-out", "--gpu", "h100", "--model", "deepseek-v3"], "deepseek-v3 does not fit on 8 x h100"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    try:
        code = ropeway.main(["audit", *arguments])
    except SystemExit as exit_:
        code = exit_.code
    said = capsys.readouterr()
    assert code == 2
    assert said.err.startswith(f"ropeway: error: {message}")
    assert said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize("text", ["", "hello\n", '{"a": 1}\n', '{"timestamp": 0, "input_length": -5}\n'])
def test_a_file_that_is_no_trace_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text(text)
    assert ropeway.main(["audit", "--trace", str(path)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"ropeway: error: {path}")
    assert said.err.count("\n") == 1


def test_a_tokenizer_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str], log: Path, tmp_path: Path) -> None:
    assert ropeway.main(["audit", "--log-file", str(log), "--tokenizer", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"ropeway: error: --tokenizer {tmp_path}: ")
