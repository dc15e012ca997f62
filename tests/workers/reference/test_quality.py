"""`ropeway quality` on a random model: what must be exact is, the others differ, and the output has its form."""

import json
import random
import subprocess
import sys
from array import array
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig

from cachecore.kv.calibration import KL_BUDGETS
from cachecore.kv.codecs.registry import CODECS
from cachecore.kv.fuser.fuse import METHODS
from cachecore.prompts.huggingface import HuggingFaceRenderer
from tests.workers.reference.support import TINY, BytesRenderer
from tests.workers.reference.test_model import SHAPE, write_model
from workers.reference import fetch
from workers.reference.config import ModelConfig
from workers.reference.model import LlamaModel
from workers.reference.quality import (
    CORPORA,
    SAMPLES,
    Case,
    QualityReport,
    cases,
    draw_prompts,
    measure,
    read_documents,
)
from workers.reference.quality_report import print_table, svg_plot, text_plot
from workers.reference.weights import load_weights, random_weights


def letters(seed: str) -> str:
    return "".join(random.Random(seed).choices("etaoin shrdlu", k=60))


TEXTS = "\n---\n".join(f"# Title {name}\n? What of {name}?\n{letters(name)}" for name in "abcdefg")
WIDE: dict[str, Any] = {**TINY, "vocab_size": 256, "max_position_embeddings": 2048, "num_hidden_layers": 6}


class OneTokenPerByte(BytesRenderer):
    def encode(self, segment: str) -> "array[int]":
        return array("I", list(segment.encode()))


@pytest.fixture(scope="module")
def report() -> QualityReport:
    torch.set_num_threads(1)
    config = ModelConfig.parse(WIDE)
    model = LlamaModel(config, random_weights(config, 1), 2048)
    prompts = list(draw_prompts(read_documents(TEXTS), OneTokenPerByte(), 2, seed=7))
    done: list[int] = []
    rows = measure(model, prompts, cases(), done.append)
    assert done == [1, 2]
    return QualityReport("tiny", "letters", 2, [row.summary() for row in rows])


def kl_of(report: QualityReport, case: Case) -> float:
    return next(row["kl_mean"] for row in report.rows if case._asdict().items() <= row.items())


def test_there_is_a_row_for_everything(report: QualityReport) -> None:
    rows = report.as_json()["rows"]
    moved = {(row["method"], row["recompute_fraction"]) for row in rows if row["cached"] == "alone"}
    wanted = {(method, fraction) for method in METHODS for fraction in (0.05, 0.15, 0.3)}
    assert moved == wanted | {("none", 0.0), ("rotation", 0.0), ("residual_propagation", 1.0)}
    assert [row["codec"] for row in rows if row["cached"] == "in_place"] == list(CODECS)
    assert all(len(row["kl_by_prompt"]) == 2 for row in rows)


@pytest.mark.parametrize("cached", ["after_system", "alone"])
def test_full_recompute_is_full_prefill_and_less_is_not(report: QualityReport, cached: str) -> None:
    assert abs(kl_of(report, Case("none", 0.0, "raw", "in_place"))) <= 1e-5
    assert abs(kl_of(report, Case("residual_propagation", 1.0, "raw", cached))) <= 1e-5
    rotation = kl_of(report, Case("rotation", 0.0, "raw", cached))
    assert rotation > 1e-3
    assert kl_of(report, Case("none", 0.0, "raw", cached)) != rotation
    assert kl_of(report, Case("query_attention", 0.3, "raw", cached)) != rotation


def test_means_are_another_copy_than_any_of_theirs(report: QualityReport) -> None:
    kl = {
        cached: kl_of(report, Case("rotation", 0.0, "raw", cached)) for cached in ("after_system", "in_context", "mean")
    }
    assert len({round(value, 9) for value in kl.values()}) == 3


def test_coarser_codecs_diverge_more(report: QualityReport) -> None:
    kl = {codec: kl_of(report, Case("none", 0.0, codec, "in_place")) for codec in CODECS}
    assert 0 < kl["i8"] < kl["fp8"] < kl["i4h"]


def test_top1_of_an_exact_context_always_agrees(report: QualityReport) -> None:
    assert next(row["top1_agreement"] for row in report.rows if row["cached"] == "in_place") == 1.0


def test_the_table_and_the_plots_show_every_way(report: QualityReport) -> None:
    output = StringIO()
    print_table(report, Console(file=output, width=120))
    assert output.getvalue().count("residual_propagation") == 4 + 8 + 2
    plot = text_plot(report)
    assert plot.count("query_attention") == 6
    longest = max(line.count("#") for line in plot.splitlines())
    assert longest == 48
    curves = ElementTree.fromstring(svg_plot(report)).findall("{*}polyline")  # noqa: S314 - our own
    assert len(curves) == 2 * (len(METHODS) + 2)


def test_prompts_are_drawn_by_the_seed() -> None:
    documents = read_documents(TEXTS)
    first, again = (list(draw_prompts(documents, OneTokenPerByte(), 3, seed=5)) for _ in range(2))
    assert first == again
    assert first != list(draw_prompts(documents, OneTokenPerByte(), 3, seed=6))
    prompt = first[0]
    assert len(prompt.passages) == 4
    assert len(set(map(tuple, prompt.passages))) == 4
    assert bytes(prompt.question).decode().startswith("Question: What of ")
    assert bytes(prompt.context).decode().count("Title ") == 4
    assert len(prompt.context) == len(prompt.system) + sum(map(len, prompt.passages))


def test_documents_may_lack_titles_and_questions() -> None:
    documents = read_documents("# One\ntext of one\n---\nno title here, only words\n---\n# T\n? Q?\nx\n---\ny\n---\n")
    assert [document.title for document in documents] == ["One", "no title here, only words", "T", "y"]
    assert documents[0].question == 'What do the passages say about "One"?'
    assert documents[2] == ("T", "Q?", "x")


def test_too_few_documents_are_refused() -> None:
    with pytest.raises(ValueError, match="1 documents: at least 4"):
        read_documents("only one")


@pytest.mark.parametrize("name", CORPORA)
def test_our_own_samples_are_read_whole(name: str) -> None:
    documents = read_documents((SAMPLES / f"{name}.txt").read_text(encoding="utf-8"))
    assert len(documents) >= 16
    assert all(document.question.endswith("?") and len(document.text) > 700 for document in documents)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ropeway", "quality", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def write_byte_tokenizer(directory: Path) -> None:
    """One token per byte, and a chat template."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def test_the_command_prints_json(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    write_model(LlamaConfig(**{**SHAPE, "vocab_size": 256, "max_position_embeddings": 2048}), model)
    write_byte_tokenizer(model)
    (tmp_path / "texts.txt").write_text(TEXTS)
    arguments = [f"--model={model}", f"--documents={tmp_path / 'texts.txt'}", "--prompts=1", "--threads=1", "--json"]
    done = run(*arguments, f"--plot={tmp_path / 'plot.svg'}")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["model"], result["corpus"], result["prompts"]) == ("tiny", "texts", 1)
    assert {"method", "recompute_fraction", "codec", "cached", "kl_mean", "top1_agreement"} <= set(result["rows"][0])
    assert (tmp_path / "plot.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["--documents=/nowhere"], "/nowhere"), (["--model=/nowhere"], "neither a directory"), (["--prompts=0"], "0")],
)
def test_what_cannot_be_measured_is_one_line(arguments: list[str], reason: str) -> None:
    done = run(*arguments)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("ropeway: error: ")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.model
@pytest.mark.quality
def test_repair_and_quantization_keep_their_promises_on_the_real_model() -> None:
    directory = fetch.fetch_smollm2(fetch.default_cache_dir()).directory
    config = ModelConfig.load(directory)
    model = LlamaModel(config, load_weights(directory, config, torch.float32, torch.device("cpu")), 2048)
    documents = read_documents((SAMPLES / "prose.txt").read_text(encoding="utf-8"))
    prompts = list(draw_prompts(documents, HuggingFaceRenderer.load(directory), 2, seed=11))
    wanted = [
        Case("rotation", 0.0, "raw", "after_system"),
        Case("residual_propagation", 0.15, "raw", "after_system"),
        Case("residual_propagation", 1.0, "raw", "after_system"),
        Case("none", 0.0, "i8", "in_place"),
    ]
    rotation, repaired, recomputed, quantized = (row.summary()["kl_mean"] for row in measure(model, prompts, wanted))
    assert repaired < 0.6 * rotation
    assert abs(recomputed) <= 1e-5
    assert quantized <= KL_BUDGETS["i8"]
