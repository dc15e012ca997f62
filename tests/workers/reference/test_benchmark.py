"""What `ropeway benchmark` measures: errors are real figures, KV arrives, and everything stands in its report."""

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from cachecore.kv.codecs.registry import CODECS
from workers.reference.benchmark import (
    ROPE_VARIANTS,
    BenchmarkReport,
    CodecFigures,
    Rate,
    RotationError,
    Shape,
    codec_figures,
    cosines,
    drawn_kv,
    kv_seconds,
    least_seconds,
    rotation_errors,
    rotation_rate,
)
from workers.reference.benchmark_moves import file_rates
from workers.reference.benchmark_report import print_tables

SMALL = Shape(layers=2, kv_heads=3, head_dim=64, tokens=64)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_moved_keys_are_within_their_bars_for_every_variant_and_shift() -> None:
    errors = rotation_errors()
    assert [row for row in errors if not 0 < row.relative_l2 <= row.bar] == []
    assert len(errors) == len(ROPE_VARIANTS) * 2 * 2
    assert {(row.dtype, row.bar) for row in errors} == {("float32", 1e-6), ("bfloat16", 3e-3)}


def test_the_least_of_each_piece_counts() -> None:
    calls: list[str] = []
    works = {name: [lambda name=name: calls.append(name)] * 2 for name in "ab"}
    seconds = least_seconds(works, rounds=3)
    assert "".join(calls) == "aabb" * 3
    assert all(0 < value < 1 for value in seconds.values())


def test_every_codec_has_its_figures() -> None:
    seconds = kv_seconds(SMALL, rounds=1)
    rows = codec_figures(SMALL, seconds, {"i8": 1e-4}, cosines(drawn_kv(SMALL), None))
    assert [row.codec for row in rows] == list(CODECS)
    by_name = {row.codec: row for row in rows}
    assert by_name["i8"].size_ratio == pytest.approx(1.939, rel=1e-3)
    assert (by_name["i8"].kl, by_name["fp8"].kl) == (1e-4, None)
    assert by_name["raw"].cosine == pytest.approx(1.0)
    assert 1 > by_name["i8"].cosine > by_name["i4h"].cosine > by_name["lm3h"].cosine > 0.98
    assert by_name["i8"].encode_share == pytest.approx(seconds.copy / seconds.encode["i8"])
    rate = rotation_rate(SMALL, seconds)
    assert rate.share == pytest.approx(seconds.copy / seconds.rotation)
    assert rate.gb_per_second == pytest.approx(2 * 2 * 64 * 3 * 64 * 2 / seconds.rotation / 1e9)


def test_a_hckv_file_gives_back_what_went_in(tmp_path: Path) -> None:
    """`file_rates` compares bit for bit, and raises."""
    rates = file_rates(SMALL, 1, tmp_path, 5.0, lambda what, done, total: None)
    assert [rate.beside for rate in rates] == ["a plain file", "a plain file", "memcpy"]
    assert all(rate.gb_per_second > 0 for rate in rates)
    assert rates[2].share == pytest.approx(rates[2].gb_per_second / 5.0)


def report_of() -> BenchmarkReport:
    errors = [
        RotationError("default", dtype, 1024, 8192, error, bar)
        for dtype, error, bar in (("float32", 2e-6, 1e-6), ("bfloat16", 2e-3, 3e-3))
    ]
    rates = [Rate("turned", 2.0, 0.2, "memcpy", 0.25), Rate("fetched", 1.0, 0.5, "loopback TCP")]
    codecs = [CodecFigures("i8", 1.94, 1.9, 4e-4, 3e-4, 0.99998, 1.0, 0.2, 0.5, 0.1, 0.15)]
    return BenchmarkReport("tiny", 1, 12.0, 5.0, errors, rates, codecs)


def test_what_misses_its_bar_is_marked() -> None:
    output = StringIO()
    print_tables(report_of(), Console(file=output, width=140))
    text = output.getvalue()
    for shown in ("2.0e-06*", "2.0e-03 ", "20%*", "50% ", "4.0e-04*", "10%*", "1.94x ", "codecs, on tiny"):
        assert shown in text
    assert json.loads(json.dumps(report_of().as_json()))["rates"][0]["bar"] == 0.25


def test_the_command_measures_everything_without_a_model(tmp_path: Path) -> None:
    arguments = ["--model=none", "--rounds=1", "--tokens=64", "--threads=1", f"--directory={tmp_path}", "--json"]
    command = [sys.executable, "-m", "ropeway", "benchmark", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["model"], report["threads"]) == (None, 1)
    assert [row["what"] for row in report["rates"]] == [
        "re-rotation: keys turned, values copied",
        ".hckv written and synced",
        ".hckv read, checked, put in place",
        ".hckv read, checked, put in place",
        "loopback fetch as raw, keys turned",
        "loopback fetch as i8, keys turned",
    ]
    assert all(row["gb_per_second"] > 0 for row in report["rates"])
    assert [row["codec"] for row in report["codecs"]] == list(CODECS)
    assert len(report["rotation_errors"]) == 4 * len(ROPE_VARIANTS)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_there_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ropeway", "benchmark", "--model=/nowhere"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("ropeway: error: /nowhere is neither a directory")
