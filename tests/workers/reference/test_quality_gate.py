"""Which codecs a model's KV may travel in is measured once, remembered, and measured anew when anything has changed."""

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from cachecore.kv.calibration import KL_BUDGETS, Calibration
from cachecore.prompts.huggingface import HuggingFaceRenderer
from tests.workers.reference.test_quality import WIDE, OneTokenPerByte
from workers.reference import fetch, quality_gate
from workers.reference.config import ModelConfig
from workers.reference.model import LlamaModel
from workers.reference.quality import Case, load_model
from workers.reference.quality_gate import Calibrating, calibrating
from workers.reference.weights import random_weights

RENDERER = OneTokenPerByte()


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    torch.set_num_threads(1)
    config = ModelConfig.parse(WIDE)
    return LlamaModel(config, random_weights(config, 1), 2048)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's directory, and the cache beside it."""
    monkeypatch.setenv("ROPEWAY_CACHE", str(tmp_path / "cache"))
    directory = tmp_path / "tiny"
    directory.mkdir()
    return directory


def kl_of(case: Case) -> float:
    return KL_BUDGETS[case.codec] * (1.5 if case.codec == "fp8" else 0.5)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """Every measurement there would have been."""
    cases: list[Case] = []

    class Scripted:
        @classmethod
        def assembling(cls, *arguments: Any) -> Generator[None, None, "Scripted"]:
            yield
            return cls()

        def compare(self, case: Case) -> tuple[float, float]:
            cases.append(case)
            return kl_of(case), 1.0

    monkeypatch.setattr(quality_gate, "Bench", Scripted)
    return cases


def calibration_of(directory: Path, model: LlamaModel, compatibility: bytes = b"class a") -> Calibration:
    return completed(calibrating(directory, model, RENDERER, compatibility))


def completed(pieces: Generator[None, None, Calibration]) -> Calibration:
    while True:
        try:
            next(pieces)
        except StopIteration as ended:
            return ended.value


def test_codecs_within_their_budgets_are_allowed_and_remembered(
    model: LlamaModel, home: Path, measured: list[Case]
) -> None:
    first = calibration_of(home, model)
    assert first.allowed == ("raw", "i8", "i4h", "lm3h")
    assert (first.model, first.prompts, first.wire_codec) == ("tiny", 4, "i8")
    assert first.kl_by_codec["fp8"] == pytest.approx(1.5 * KL_BUDGETS["fp8"])
    assert calibration_of(home, model) == first
    assert measured == [Case("none", 0.0, codec, "in_place") for codec in KL_BUDGETS] * 4
    assert [path.name[:15] for path in home.iterdir()] == ["ropeway-codecs-"]


def test_other_weights_are_measured_for_themselves(model: LlamaModel, home: Path, measured: list[Case]) -> None:
    calibration_of(home, model)
    calibration_of(home, model, b"class b")
    calibration_of(home, model)
    assert len(measured) == 2 * 4 * 4
    assert len(list(home.iterdir())) == 2


def test_a_changed_codec_is_measured_anew(
    model: LlamaModel, home: Path, measured: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration_of(home, model)
    monkeypatch.setattr(quality_gate, "CODECS", {**quality_gate.CODECS, "i4h": quality_gate.CODECS["i8"]})
    calibration_of(home, model)
    assert len(measured) == 2 * 4 * 4


def test_a_directory_that_takes_no_file_leaves_it_to_the_cache(
    model: LlamaModel, home: Path, measured: list[Case]
) -> None:
    missing = home / "model.gguf" / "inside"
    (home / "model.gguf").write_text("a file")
    for _ in range(2):
        calibration_of(missing, model)
    assert len(measured) == 4 * 4
    assert len(list((home.parent / "cache" / "codecs").iterdir())) == 1


@pytest.mark.parametrize("content", ["", "[]", '{"prompts": 4}', '{"prompts": 4, "kl_by_codec": {"i8": "small"}}'])
def test_a_broken_file_is_measured_anew(model: LlamaModel, home: Path, measured: list[Case], content: str) -> None:
    calibration_of(home, model)
    (path,) = home.iterdir()
    path.write_text(content)
    calibration_of(home, model)
    assert len(measured) == 2 * 4 * 4
    assert json.loads(path.read_text())["prompts"] == 4


def test_a_context_too_short_for_the_canaries_leaves_raw(home: Path, measured: list[Case]) -> None:
    config = ModelConfig.parse(WIDE)
    calibration = calibration_of(home, LlamaModel(config, random_weights(config, 1), 256))
    assert (calibration.allowed, calibration.prompts, measured) == (("raw",), 0, [])


def test_an_idle_engine_measures_in_pieces(model: LlamaModel, home: Path, measured: list[Case]) -> None:
    told: list[Calibration] = []
    chore = Calibrating(calibrating(home, model, RENDERER, b"class a"), told.append)
    steps = 0
    while chore.has_work:
        chore.step()
        steps += 1
        assert len(measured) <= steps
    assert steps == 4 * (1 + 4) + 1
    assert [calibration.wire_codec for calibration in told] == ["i8"]
    again = Calibrating(calibrating(home, model, RENDERER, b"class a"), told.append)
    again.step()
    assert (again.has_work, told[1]) == (False, told[0])


def test_a_measurement_that_fails_is_given_up(model: LlamaModel, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Calibration] = []
    monkeypatch.setattr(quality_gate, "Bench", None)
    chore = Calibrating(calibrating(home, model, RENDERER, b"class a"), told.append)
    chore.step()
    assert (chore.has_work, told, list(home.iterdir())) == (False, [], [])


def test_heads_that_a_codec_cannot_pack_rule_it_out(home: Path) -> None:
    """Measured for real: half of the codecs, on random weights."""
    config = ModelConfig.parse({**WIDE, "head_dim": 12, "num_hidden_layers": 2})
    model = LlamaModel(config, random_weights(config, 1), 2048)
    calibration = calibration_of(home, model)
    assert calibration.kl_by_codec["lm3h"] == float("inf")
    assert 0 < calibration.kl_by_codec["i8"] < calibration.kl_by_codec["i4h"]
    assert "lm3h" not in calibration.allowed


@pytest.mark.model
@pytest.mark.quality
def test_every_codec_is_good_enough_for_the_real_model(home: Path) -> None:
    directory = fetch.fetch_smollm2(Path.home() / ".cache" / "ropeway").directory
    renderer = HuggingFaceRenderer.load(directory)
    calibration = completed(calibrating(home, load_model(directory), renderer, b"class a"))
    assert calibration.allowed == ("raw", *KL_BUDGETS)
    assert calibration.kl_by_codec["i8"] < calibration.kl_by_codec["fp8"] < calibration.kl_by_codec["i4h"]
