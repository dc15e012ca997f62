"""What it costs to render, tokenize and name prompts.

    python tests/bench/bench_prompts.py [--tokenizer DIR] [--json FILE]

`cold` is the first time a text is seen, with the words of its language known; `next turn` adds a short user turn to a
conversation that was named before; `tokenizer` is the tokenizer library alone on the same text. Without `--tokenizer` a
small byte-level BPE is trained here. Medians, and the fastest run in brackets.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from cachecore.prompts.huggingface import HuggingFaceRenderer
from cachecore.prompts.naming import PromptNamer
from cachecore.scope import DEFAULT_TENANT, IdentityScope, KeyId, Keyring, Naming

LENGTHS_TOKENS = (1_024, 8_192, 65_536)
BIG_BODY_CHARACTERS = 34_000
BLOCK_SIZE_TOKENS = 16
NAMER_BYTES = 256 * 2**20
SYSTEM = "You are a helpful assistant. Be concise and correct."
SENTENCES = (
    "the quick brown fox jumps over a lazy dog while nobody in town knows what capital city river mountain he means, "
    "so please tell me about it. Answer in one short sentence; name 3 places, 12 people and no more than 45 things!\n"
)
WORDS = SENTENCES.split(" ")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def trained_directory(directory: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=2_000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SENTENCES] * 8, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    return directory


class Bench:
    """One renderer and one namer, and texts that they have not seen."""

    def __init__(self, renderer: HuggingFaceRenderer, seed: int) -> None:
        self.renderer = renderer
        self.random = random.Random(seed)
        self.naming = Naming.of(IdentityScope("bench", KeyId(DEFAULT_TENANT, 0), BLOCK_SIZE_TOKENS), Keyring.generate())
        self.namer = PromptNamer(NAMER_BYTES)
        self.name(self.chat(self.text(4_096)))

    def rows(self) -> Iterator[dict[str, Any]]:
        small = [self.chat(SYSTEM) for _ in range(3_000)]
        yield self.row("small chat, fresh turn", self.name, small)
        prompts = ["".join(self.renderer.chat(request).segments) for request in small]
        yield self.row("small chat, tokenizer alone", self.encode_by_library, prompts)
        document = self.text(BIG_BODY_CHARACTERS)[:BIG_BODY_CHARACTERS]
        self.name(self.chat(document))
        # Every request brings its own copy of the system prompt, as parsed JSON does.
        big = [self.chat("".join([document[:9], document[9:]])) for _ in range(600)]
        yield self.row("34 KB system prompt known, fresh turn", self.name, big)
        for length in LENGTHS_TOKENS:
            yield from self.rows_of_length(length)

    def rows_of_length(self, length: int) -> Iterator[dict[str, Any]]:
        texts = [self.text(length) for _ in range(5)]
        yield self.row(f"{length} tokens, tokenizer alone", self.encode_by_library, texts)
        yield self.row(f"{length} tokens, cold", self.name, [self.chat(text) for text in texts])
        yield self.row(f"{length} tokens, next turn", self.name, [self.chat(texts[0]) for _ in range(200)])
        ids = list(self.renderer.encode(texts[0]))
        yield self.row(f"{length} tokens, as ids, cold", self.name_ids, [[*ids[:-1], last] for last in range(5)])

    def name(self, request: dict[str, Any]) -> int:
        return self.namer.name(self.renderer, self.naming, self.renderer.chat(request)).token_count

    def encode_by_library(self, text: str) -> int:
        return len(self.renderer.tokenizer.encode(text, add_special_tokens=False).ids)

    def name_ids(self, token_ids: list[int]) -> int:
        return PromptNamer(NAMER_BYTES).name_tokens(self.naming, token_ids).token_count

    def row(self, case: str, action: Callable[[Any], int], inputs: list[Any]) -> dict[str, Any]:
        """Microseconds of `action` per input: the median, and the least, which says what it costs undisturbed."""
        durations, tokens = [], 0
        for value in inputs:
            start = time.perf_counter_ns()
            tokens = action(value)
            durations.append((time.perf_counter_ns() - start) / 1e3)
        us_p50, us_min = statistics.median(durations), min(durations)
        return {"case": case, "tokens": tokens, "us_p50": round(us_p50, 1), "us_min": round(us_min, 1)}

    def text(self, tokens: int) -> str:
        words = self.random.choices(WORDS, k=tokens)
        size = len(self.renderer.encode(" ".join(words)))
        return " ".join(words[: tokens * tokens // size])

    def chat(self, system: str) -> dict[str, Any]:
        turn = " ".join(self.random.choices(WORDS, k=9))
        return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": turn}]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="a Hugging Face model directory")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        renderer = HuggingFaceRenderer.load(arguments.tokenizer or trained_directory(Path(scratch)))
        result = list(Bench(renderer, arguments.seed).rows())
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    print(f"{'case':<40}{'tokens':>8}{'us':>12}")
    for row in result:
        print(f"{row['case']:<40}{row['tokens']:>8}{row['us_p50']:>12,.1f}  ({row['us_min']:,.1f})")


if __name__ == "__main__":
    main()
